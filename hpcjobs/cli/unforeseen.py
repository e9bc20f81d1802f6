"""Reports unexpected errors: one line on the screen, the details in a file."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hpcjobs import __version__

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR)
DEBUG_VARIABLE = "HPCJOBS_DEBUG"


def debugging() -> bool:
    """Whether tracebacks are to be shown: ``hpcjobs --debug VERB``, or HPCJOBS_DEBUG=1."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def explain(error: Exception) -> str:
    """Return one line for ``error``; its traceback goes to the screen when debugging, otherwise to a file."""
    details = "".join(traceback.format_exception(error))
    if debugging():
        sys.stderr.write(details)
        return _summary(error)
    place = _write(details)
    where = f"details in {place}" if place is not None else "details: hpcjobs --debug VERB ..."
    return f"{_summary(error)} ({where})"


def current_folder_is_gone() -> bool:
    """Whether the current folder of this process has been removed."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def refused_file(error: Exception) -> str | None:
    """Return one line if the system refused a file to this user; otherwise None."""
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        return f"{Path(os.fsdecode(error.filename)).absolute()}: {error.strerror}"
    return None


def _summary(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        return ": ".join([error.strerror, " and ".join(names)]) if names else error.strerror
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"unexpected {type(error).__name__}: {first_line}"


def _write(details: str) -> Path | None:
    """The file with ``details``, in the user's state folder or, where that cannot be written, in the temporary one."""
    context = [
        f"hpcjobs {__version__}, Python {sys.version.split()[0]}, {time.strftime('%F %T %z')}",
        f"command: {sys.argv!r}",
        f"encoding of files: {sys.getfilesystemencoding()}, of the terminal: {getattr(sys.stdout, 'encoding', None)}",
    ]
    text = "\n".join([*context, "", details])
    for folder in (_state_folder, tempfile.gettempdir):
        try:
            place = Path(folder())
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, path = tempfile.mkstemp(".txt", time.strftime("error-%Y%m%d-%H%M%S-"), place)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except (OSError, RuntimeError):  # a full disk, or a user without a home
            continue
        return Path(path)
    return None


def _state_folder() -> str:
    from hpcjobs.files import state_dir

    return str(state_dir() / "errors")
