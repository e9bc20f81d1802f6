"""Children that start with clean signals, end when their parent ends, or notice that it has ended.

Every launch loads this module, so it imports no module that is slow to load (``subprocess``, ``typing``).
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int) -> None:
    """In a fresh child: have the kernel send ``number`` to this process when ``parent`` dies.

    The parent may have died before the kernel was told to signal us; then the child ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none escapes by forking twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def fork() -> int:
    """Fork; the child starts with the default action for every signal.

    Python, and shells that start commands in the background, ignore some signals. A signal that arrives during the fork
    is delivered after it: the child would otherwise pass it to a copy of this process's handler, and lose it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def is_on_path(program: str, path: "str | None" = None) -> bool:
    """Whether a shell finds ``program``: a folder of PATH that may not be read is passed over, not an error."""
    searched = os.environ.get("PATH", os.defpath) if path is None else path
    folders = [""] if "/" in program else searched.split(":")
    return any(os.path.exists(os.path.join(folder, program)) for folder in folders)


def start_child(argv: "list[str]", environ: "dict[str, str]", prepare: "Callable[[], None]") -> int:
    """Start ``argv`` in a child with clean signals that calls ``prepare`` first; its process id.

    A child that cannot become the program reports it on standard error, and ends with code 126 or 127 as in a shell.
    """
    pid = fork()
    if pid == 0:
        code, program = 127, None
        try:
            prepare()
            program = argv[0]
            os.execvpe(program, argv, environ)
        except OSError as error:
            denied = isinstance(error, PermissionError) and (
                program is None or is_on_path(program, environ.get("PATH"))
            )
            code = 126 if denied else 127
            reason = error.strerror if denied or program is None else os.strerror(errno.ENOENT)
            message = f"hpcjobs: {program or error.filename}: {reason}\n"
            os.write(2, message.encode("utf-8", "surrogateescape"))
        finally:
            os._exit(code)
    return pid


def fork_call(action: "Callable[[], None]") -> int:
    """Call ``action`` in a child, which ends after it with code 0, or 1 for an exception; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return pid


def continue_in_background() -> None:
    """Continue in a forked child; the calling process ends here, with code 0."""
    if os.fork():
        os._exit(0)


class Guard:
    """A forked process that runs ``action`` if this process dies before it calls `release`."""

    def __init__(self, action: "Callable[[], None]") -> None:
        read, self._write = os.pipe()
        # A signal to the whole process group must not end the guard, which has to outlive the group.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write)
            _stand_guard(read, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)

    def release(self) -> None:
        """End the guard without its action, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, b".")
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_guard(read: int, action: "Callable[[], None]") -> None:
    """Never returns."""
    code = 1
    try:
        if not os.read(read, 1):
            action()
        code = 0
    finally:
        os._exit(code)


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
