"""Standard output and standard error of the command line: all text is made printable (`hpcjobs.printable`).

An error is a JSON document if the command was asked for JSON and has printed none.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO, cast

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

    def leave(number: int, frame: object) -> None:
        for one in (signal.SIGTERM, signal.SIGHUP):  # a second one would end the undoing
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


class _JsonState:
    is_requested = is_printed = False
    usage_error: str | None = None
    """The message of an error of usage, which Typer prints."""


json_state = _JsonState()


def reset_json() -> None:
    """Forget the last command: tests run several in one process."""
    json_state.is_requested = json_state.is_printed = False
    json_state.usage_error = None


def note_json(value: bool) -> bool:
    """Callback of ``--json``."""
    json_state.is_requested = json_state.is_requested or value
    return value


def fail(message: str, *, exit_code: int, hint: str | None = None, maybe_taken: bool = False) -> NoReturn:
    """End this process; print the error as JSON if JSON is requested and no output was printed yet."""
    if json_state.is_requested and not json_state.is_printed:
        from hpcjobs.cli.output import print_json

        with contextlib.suppress(OSError):  # the reader has closed the pipe
            error = {"exit_code": exit_code, "message": message, "hint": hint, "maybe_taken": maybe_taken}
            print_json({"error": error})
            sys.stdout.flush()
    sys.exit(exit_code)
