"""Waits for several things at once, without polling."""

import os
import select
import signal

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """Signals as something to wait for: between two waits they queue, none is lost."""

    def __init__(self, *numbers: int) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in numbers:
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._write)

    def wait(self, timeout_s: "float | None", *others: int) -> "list[int]":
        """Signals that came; returns also when one of the ``others`` can be read, or the time is over."""
        poll = select.poll()
        for handle in (self._read, *others):
            poll.register(handle, select.POLLIN)
        poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Stop noting signals, and close the pipe."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


class SupervisorEvents:
    """Events that wake a supervisor: signals, and a FIFO that other processes write to."""

    def __init__(self, fifo: str) -> None:
        # Read and write: a FIFO that has only readers reports its end for ever.
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = SignalPipe(signal.SIGCHLD, *_STOPPING)
        self.stop_requested = False

    def wait(self, timeout_s: "float | None") -> bool:
        """Return when something happened (True) or the time is over."""
        numbers = self._signals.wait(timeout_s, self._fifo)
        self.stop_requested = self.stop_requested or any(number in numbers for number in _STOPPING)
        try:
            return bool(os.read(self._fifo, 4096) or numbers)
        except BlockingIOError:
            return bool(numbers)

    def close(self) -> None:
        """Stop noting signals, and close the FIFO."""
        self._signals.close()
        os.close(self._fifo)
