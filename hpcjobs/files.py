"""Files that other processes read while they are written, and the user's name and XDG folders.

Standard library of Python 3.6: programs for nodes are packed with this module (`hpcjobs.packing`).
"""

import errno
import fcntl
import os
import pwd
import re
import shlex
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, NamedTuple, Optional, Union

AnyPath = Union[str, "os.PathLike[str]"]


def file_name(text: str) -> str:
    """``text``, such as a job's name, as a part of file names: characters that need quotes become ``_``."""
    return re.sub(r"^[.-]|[^\w.-]", "_", text, flags=re.ASCII)


def path_word(path: AnyPath) -> str:
    """``path`` as one word of a command line, which no program takes for an option."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/hpcjobs``, for files that may be lost at any time."""
    return _user_dir("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """``$XDG_CONFIG_HOME/hpcjobs``, for the user's settings."""
    return _user_dir("XDG_CONFIG_HOME", ".config")


def state_dir() -> Path:
    """``$XDG_STATE_HOME/hpcjobs``, for records of jobs, nodes and clusters."""
    return _user_dir("XDG_STATE_HOME", ".local/state")


def runtime_dir() -> Optional[Path]:
    """``$XDG_RUNTIME_DIR/hpcjobs``, for sockets; None where another user can make something in a folder above it."""
    text = os.environ.get("XDG_RUNTIME_DIR")
    if not text or not os.access(text, os.W_OK | os.X_OK):
        return None
    folder = Path(text)
    if folder.is_dir() and all(_is_closed(each) for each in (folder, *folder.parents)):
        return folder / "hpcjobs"
    return None


def _is_closed(folder: Path) -> bool:
    """Whether only root and this user can make something in it."""
    status = folder.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _user_dir(variable: str, in_home: str) -> Path:
    """Raises OSError: another user has planted a folder on the way: what is read there runs as this user."""
    folder = Path(os.environ.get(variable) or Path.home() / in_home).absolute() / "hpcjobs"
    require_unplanted(folder)
    return folder


def make_folder(folder: AnyPath, mode: int = 0o700) -> None:
    """Make ``folder`` and the missing ones above it, all with ``mode`` less the bits of the umask. Raises OSError."""
    path = Path(folder)
    for place in () if path.is_dir() else (*reversed(path.parents), path):
        place.mkdir(mode, exist_ok=True)


def make_own_folder(folder: AnyPath) -> None:
    """Make a folder of mode 0700 with a predictable name, if it is missing.

    Raises OSError: it cannot be made, or it belongs to another user, who could replace its content.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if os.stat(folder).st_uid != os.getuid():
            raise _refusal(folder, "it belongs to another user, who could replace what runs as you") from None
        require_unplanted(folder)


def require_unplanted(folder: AnyPath) -> None:
    """Refuse a path on which another user has planted a folder or link (`find_planted`). Raises OSError: names it."""
    planted = find_planted(folder)
    if planted is not None:
        text = "it belongs to another user, who could replace what runs as you, and everybody may write to"
        raise _refusal(planted, f"{text} {os.path.dirname(planted)}")


def find_planted(folder: AnyPath) -> Optional[str]:
    """The folder or link of another user on the way to ``folder`` that was made where everybody may make one.

    A group's folder elsewhere is used, whoever made it. What is not there yet was made by nobody.
    """
    for path in dict.fromkeys((os.path.abspath(folder), os.path.realpath(folder))):
        while path != os.path.dirname(path):
            parent = os.path.dirname(path)
            if _is_of_another(path) and os.stat(parent).st_mode & 0o002:
                return path
            path = parent
    return None


def _is_of_another(path: str) -> bool:
    try:
        return os.lstat(path).st_uid not in (0, os.getuid())
    except OSError:  # it is not there, or in a folder that this user cannot use
        return False


def leads_elsewhere(path: AnyPath) -> bool:
    """Whether ``path`` goes through a link that another user has made."""
    path = Path(os.path.abspath(path))
    return any(place.is_symlink() and place.lstat().st_uid not in (0, os.getuid()) for place in (path, *path.parents))


def _refusal(folder: AnyPath, text: str) -> OSError:
    return PermissionError(errno.EPERM, text, os.fspath(folder))


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system without room, or of a quota that is used up."""
MOST_BYTES = 64 << 20
"""Largest file that is read completely: hpcjobs writes no larger ones."""


def open_regular(path: AnyPath, *, folder: Optional[int] = None) -> BinaryIO:
    """Open a file that may be anybody's for reading; a pipe or a device of its name is not waited for.

    Args:
        folder: the open folder of the file: what has taken its name meanwhile is not followed.

    Raises OSError: it cannot be opened, or is not a regular file.
    """
    return os.fdopen(_open_regular(path, folder), "rb")


def _open_regular(path: AnyPath, folder: Optional[int] = None) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if folder is None:
        descriptor = os.open(path, flags)
    else:
        descriptor = os.open(os.path.basename(path), flags | os.O_NOFOLLOW, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return descriptor


def read_regular(path: AnyPath) -> bytes:
    """The content of a file that may be anybody's; what is appended meanwhile may be missing.

    Raises OSError: as `open_regular`, or it is larger than `MOST_BYTES`.
    """
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MOST_BYTES >> 20} MiB", os.fspath(path))
        content = piece = os.read(descriptor, size)
        while piece and len(content) < size:
            piece = os.read(descriptor, size - len(content))
            content += piece
        return content
    finally:
        os.close(descriptor)


def write_beside(
    path: AnyPath, content: Union[bytes, str], *, mode: Optional[int] = 0o600, durable: bool = True
) -> None:
    """Write ``content`` to ``path`` in one step: a reader sees the old file or the complete new one.

    Args:
        mode: permissions of the file, regardless of the umask; None: 0666 without the bits of the umask.
        durable: the file outlives a crash of the machine. False: for content that can be made again.

    Raises OSError: it cannot be written; the old file stays unchanged.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    folder, name = os.path.split(os.fspath(path))
    beside = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(2).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(beside, flags, 0o666 if mode is None else mode)
    except OSError as error:
        error.filename = os.fspath(path)  # the user does not know the temporary file
        raise
    try:
        with naming_errors(path), os.fdopen(descriptor, "wb") as file:
            if mode is not None and mode & 0o077:
                _set_mode(descriptor, mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # the user does not know the temporary file
        if os.path.exists(beside):
            os.unlink(beside)
        raise
    if durable:
        sync_folder(folder or ".")


@contextmanager
def naming_errors(path: AnyPath) -> Iterator[None]:
    """Add ``path`` to errors of an open file: the system's error of a failed write, as on a full disk, has no name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def _set_mode(descriptor: int, mode: int) -> None:
    """Give a file that others may read its permissions, whatever the umask; some file systems have none."""
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise


def append_lines(path: AnyPath, lines: Iterable[str]) -> None:
    """Append ``lines`` to ``path``, a private file, in one write: lines of two processes do not mix.

    The first line starts a new line even if a full disk has cut the last one short. The lines outlive a crash.

    Raises OSError: they cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        cut_short = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        text = "".join(f"{line}\n" for line in lines)
        data = (b"\n" if cut_short else b"") + text.encode("utf-8", "surrogateescape")
        with naming_errors(path):
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoredLine(NamedTuple):
    """A line of an `AppendStore`."""

    path: Path
    number: int
    text: bytes

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}"


def raise_error(error: OSError) -> None:
    """Raise an error that `os.walk` or a store would pass over."""
    raise error


class AppendStore:
    """A folder below `state_dir` with a log for each host, a line per record.

    Each host appends to a separate log, all lines in one write, so no locks are needed: network file systems may lack
    or lose locks. Lines are never changed, and a full disk cuts short at most the last one.

    Args:
        names: path below `state_dir`, or an absolute path.
    """

    def __init__(self, *names: str) -> None:
        self.folder = state_dir().joinpath(*names)

    def append(self, lines: Iterable[str]) -> None:
        """Append to this host's log. Raises OSError."""
        make_folder(self.folder)
        append_lines(self.folder / (os.uname().nodename + ".jsonl"), lines)

    def read(self, report: Callable[[OSError], None] = raise_error) -> Iterator[StoredLine]:
        """Read all logs, each in its order; ``report`` gets the error of an unreadable folder or log."""
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".jsonl") and name[0] != ".")
        except FileNotFoundError:
            return
        except OSError as error:
            report(error)
            return
        for path in map(self.folder.joinpath, names):
            try:
                lines = read_regular(path).split(b"\n")
            except OSError as error:
                report(error)
                continue
            yield from (StoredLine(path, number, line) for number, line in enumerate(lines, 1) if line)


_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of Lustre without its mount option flock, and of network file systems with a lock service that is down."""


def lock_file(descriptor: int, *, wait: bool = True, by_process: bool = False) -> bool:
    """Lock an open file until it is closed. False: its file system has no locks, and the caller continues without.

    Args:
        by_process: use a POSIX lock, which belongs to the process and not to the open file.

    Raises BlockingIOError: the lock is taken, and the caller does not ``wait``. OSError: it cannot be locked.
    """
    lock = fcntl.lockf if by_process else fcntl.flock
    try:
        lock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def sync_folder(folder: AnyPath) -> None:
    """Bring a new name in ``folder`` to the disk; some network file systems have no such request, and need none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def is_own_folder(folder: str) -> bool:
    """Whether the folder still belongs to this user, also a link in its place: others may write beside it."""
    try:
        return {os.stat(folder).st_uid, os.lstat(folder).st_uid} == {os.getuid()}
    except OSError:
        return False


def user_name() -> str:
    """The user's name, or the number of a user without one, as in many containers."""
    return name_of(os.getuid())


def name_of(uid: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
