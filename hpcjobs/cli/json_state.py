"""Notes whether a command is asked for JSON and has printed it, so that its error is a JSON document too."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn


class _State:
    is_requested = is_printed = False
    usage_error: str | None = None
    """The message of an error of usage, which Typer prints."""


state = _State()


def begin() -> None:
    """Forget the last command: tests run several in one process."""
    state.is_requested = state.is_printed = False
    state.usage_error = None


def note_request(value: bool) -> bool:
    """Callback of ``--json``."""
    state.is_requested = state.is_requested or value
    return value


def fail(message: str, *, exit_code: int, hint: str | None = None, maybe_taken: bool = False) -> NoReturn:
    """End this process; print the error as JSON if JSON is requested and no output was printed yet."""
    if state.is_requested and not state.is_printed:
        from hpcjobs.cli.output import print_json

        with contextlib.suppress(OSError):  # the reader has closed the pipe
            error = {"exit_code": exit_code, "message": message, "hint": hint, "maybe_taken": maybe_taken}
            print_json({"error": error})
            sys.stdout.flush()
    sys.exit(exit_code)
