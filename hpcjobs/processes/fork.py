"""Children that start with clean signals, go when their parent goes, or notice that it went."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ANSWERED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int) -> None:
    """In a fresh child: have the kernel send ``number`` to this process when ``parent`` dies.

    The parent may have died before the kernel was asked; then the child ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none escapes by forking twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def fork() -> int:
    """Fork; the child starts with the default answer to every signal, also to those that Python, and
    shells that start commands in the background, ignore.

    One that arrives in between is delivered afterwards: the child would otherwise answer it with a
    copy of this process's handler, that is, not at all.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in _ANSWERED:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


class Guard:
    """A forked process that runs ``action`` if this process dies before it calls `release`."""

    def __init__(self, action: Callable[[], None]) -> None:
        read, self._write = os.pipe()
        # Signals meant for the whole group must not end the one who is to outlive it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write)
            _stand_guard(read, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)

    def release(self) -> None:
        """Stand down, and be waited for."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, b".")
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_guard(read: int, action: Callable[[], None]) -> None:
    """Never returns."""
    code = 1
    try:
        if not os.read(read, 1):
            action()
        code = 0
    finally:
        os._exit(code)
