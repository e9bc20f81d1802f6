"""Defers the signals that would end this process, during work that must not stop half-way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTE = b"hpcjobs: interrupted: this ends when the scheduler has answered, so that no job is lost\n"


@contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Within the block, signals of `ENDING` are noted in the list given; the first is raised again after it.

    Only the main thread defers signals, because Python runs handlers in the main thread alone.
    """
    received: list[int] = []
    if current_thread() is not main_thread():
        yield received
        return

    def note(number: int, _: object) -> None:
        if not received:
            os.write(2, _NOTE)  # not by print: it may have been interrupted in the middle of printing
        received.append(number)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    handled = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
