"""Signals as events that can be awaited: a handler notes the signal, and the main loop acts on it."""

import contextlib
import os
import select
import signal
from typing import List

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


class Signals:
    """Signals as events that can be awaited with a timeout."""

    def __init__(self) -> None:
        self._arrived: List[int] = []
        self._out, write = os.pipe()
        for number in (self._out, write):
            os.set_blocking(number, False)
        signal.set_wakeup_fd(write)
        for number in _NUMBERS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._arrived.append(number)

    def wait(self, timeout_s: float) -> List[int]:
        """Signals that arrived, at once or within ``timeout_s``."""
        if not self._arrived:
            select.select([self._out], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)
        arrived, self._arrived = self._arrived, []
        return arrived
