"""Writes to standard output and standard error, also after their reader has ended.

Python ends with code 120 if it cannot flush a stream at exit, and with 1 if a print fails: both hide the program's exit
code.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def print_error(text: str) -> None:
    """Print a line on standard error, or nowhere."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def flush() -> None:
    """Flush both streams before the interpreter does; output without a reader is discarded."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect ``stream`` with its buffer to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
