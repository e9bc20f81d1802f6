"""Ends a command that is signalled as Ctrl-C does, so that it leaves nothing behind."""

from __future__ import annotations

import signal
import sys


def exit_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end this command as Ctrl-C does: what it began is undone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
