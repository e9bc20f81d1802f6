"""Standard output and standard error of the command line: all text is made printable (`hpcjobs.printable`)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from hpcjobs.printable import printable, printable_document


class PrintableStream:
    """A stream that makes its text printable; everything but text is passed on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._colours = stream.isatty()

    def write(self, text: str) -> int:
        self.stream.write(printable(text, colours=self._colours))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Within the block, standard output and standard error take printable text alone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """The stream itself, for our own movements of the cursor."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def write_document(text: str) -> None:
    """Write a script, table or log to standard output: exactly, unless a terminal reads it."""
    stream = raw(sys.stdout)
    stream.write(printable_document(text) if stream.isatty() else text)


def exit_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end this command like Ctrl-C, so that its work is undone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
