"""Keeps text of others from commanding the terminal: what the command line prints passes here.

Names of jobs, reasons, logs and messages of programs come from whoever wrote them. Control characters (C0, C1), marks
that change the direction of text, and invisible characters are replaced; colours stay, on a terminal.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_COMMANDS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f"
)
_COMMAND = re.compile(f"[{_COMMANDS}]")
_COMMAND_BUT_COLOUR = re.compile(rf"(\x1b\[(?!(?:\d+;)*8[;m])[0-9;]*m)|[{_COMMANDS}]")  # 8 hides text


def printable(text: str, *, colours: bool = False) -> str:
    """``text`` without what a terminal would obey; ``colours``: but for those."""
    if not colours:
        return _COMMAND.sub("?", text)
    return _COMMAND_BUT_COLOUR.sub(lambda match: match[1] or "?", text)


def escape_json(text: str) -> str:
    """JSON with the same value, in which a terminal has nothing to obey."""
    return re.sub(rf"(?!\n)[{_COMMANDS}]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class PrintableStream:
    """A stream whose text is made printable; everything else is the stream's own."""

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


def printable_document(text: str) -> str:
    """``text`` with its colours and carriage returns, which progress bars use."""
    return "\r".join(printable(part, colours=True) for part in text.split("\r"))


def exit_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end this command as Ctrl-C does: what it began is undone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
