"""Writes to standard output and standard error, whose reader may have ended.

Python ends with code 120 where it cannot write what is left in a stream, and with 1 where a print fails: both
hide the exit code that says why the program ended.
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
    """Write out what was printed, before the interpreter tries to; what no process reads is discarded."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Send ``stream`` to /dev/null from now on, with what it still holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
