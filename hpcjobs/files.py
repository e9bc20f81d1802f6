"""Writing files that other processes watch: beside, then renamed, so that nobody reads half a file; and the cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/hpcjobs``: what may be lost at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcjobs"


def write_beside(path: Path, content: bytes | str, *, mode: int = 0o600, durable: bool = True) -> None:
    """Write ``content`` to ``path`` in one step: a reader sees the old file or the complete new one.

    It outlives a crash of the machine unless ``durable`` is False, for what can be made again.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(2).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring a new name in ``folder`` to the disk; some network file systems have no such request, and need none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
