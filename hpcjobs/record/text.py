"""Small text files that may not be there."""

import contextlib
import os

from hpcjobs.files import read_regular


def read_text(path: str) -> str:
    """The text of ``path``, empty if it does not exist. Raises OSError if it cannot be read."""
    try:
        return read_regular(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def remove(path: str) -> None:
    """Remove ``path`` if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
