"""Files of the control directory that may not be there."""

import contextlib
import os


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
