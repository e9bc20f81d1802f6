"""Files that other processes watch: written beside and renamed, and on disk before anything is built on them."""

import contextlib
import os


def write_beside(path: str, text: str) -> None:
    """Replace ``path`` in one step. Raises OSError."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def append_line(path: str, line: str) -> None:
    """Append ``line``, on a line of its own also below one that was cut short. Raises OSError."""
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(number).st_size
        cut_short = size > 0 and os.pread(number, 1, size - 1) != b"\n"
        os.write(number, (("\n" if cut_short else "") + line + "\n").encode())
        os.fsync(number)
    finally:
        os.close(number)


def read_text(path: str) -> str:
    """The text of ``path``, empty where there is none. Raises OSError if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def remove(path: str) -> None:
    """Remove ``path`` if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
