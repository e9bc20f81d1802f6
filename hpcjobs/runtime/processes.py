"""Processes on this machine: who belongs to a job, how it is ended, who notices when its keeper dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, NoReturn

MARK = "HPCJOBS_LOCAL_JOB"
"""Variable that names the job's folder in every process of a job, also in those that left its session."""
_KILL_ROUNDS, _KILL_WAIT_S = 5, 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ANSWERED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
)
_libc = ctypes.CDLL(None, use_errno=True)


class Leader(NamedTuple):
    """A process, told apart from a later one with the same number."""

    pid: int
    start_ticks: int
    boot_id: str


class Process(NamedTuple):
    """One line of the kernel's process table."""

    pid: int
    ppid: int
    group: int
    session: int
    start_ticks: int


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


def identity(pid: int) -> Leader | None:
    """Who ``pid`` is now; None: nobody."""
    process = _read(pid)
    return None if process is None else Leader(pid, process.start_ticks, boot_id())


def boot_id() -> str:
    """Changes with every start of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _read(pid: int) -> Process | None:
    """None: gone, or dead and not yet waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def parent(pid: int) -> int | None:
    """The process that ``pid`` is a child of; None: it is gone."""
    process = _read(pid)
    return None if process is None else process.ppid


def _table() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        process = _read(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def _mark(pid: int) -> bytes | None:
    """The job folder a process carries in its environment; None: none, or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    prefix = MARK.encode() + b"="
    return next((entry[len(prefix) :] for entry in entries if entry.startswith(prefix)), None)


def in_groups(groups: Collection[int]) -> list[int]:
    """Living processes of these process groups."""
    return [process.pid for process in _table() if process.group in groups]


def members(folder: str, leader: Leader | None, *, adopted_by: int | None = None) -> list[int]:
    """Living processes of the job in ``folder``.

    They carry its mark; or they are in the session of ``leader``, as long as that is the process that
    was recorded; or they descend from ``adopted_by`` (the supervisor) and carry no other job's mark.
    """
    table, mine = list(_table()), os.fsencode(folder)
    marks = {process.pid: _mark(process.pid) for process in table}
    found = {pid for pid, mark in marks.items() if mark == mine}
    if leader is not None and identity(leader.pid) == leader:
        found |= {process.pid for process in table if process.session == leader.pid}
    if adopted_by is not None:
        found |= _descendants(adopted_by, table, lambda pid: marks[pid] in (None, mine))
    return sorted(found - {os.getpid()})


def _descendants(root: int, table: Iterable[Process], counts: Callable[[int], bool]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        new = [pid for pid in children.get(todo.pop(), ()) if pid not in found and counts(pid)]
        found.update(new)
        todo += new
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal each process that is still there and ours."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(living: Callable[[], list[int]], *, grace_s: float) -> None:
    """SIGTERM to all who are ``living``, and after ``grace_s`` SIGKILL until nobody is."""
    if grace_s > 0:
        pids = living()
        send(pids, signal.SIGTERM)
        await_gone(pids, grace_s)
    for _ in range(_KILL_ROUNDS):
        pids = living()
        if not pids:
            return
        send(pids, signal.SIGKILL)
        await_gone(pids, _KILL_WAIT_S)


def await_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Return when all ``pids`` have ended or the time is over. They need not be children."""
    until = time.monotonic() + timeout_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except OSError:  # Linux before 5.3 has nothing to wait on
            while _read(pid) is not None and time.monotonic() < until:
                time.sleep(0.02)
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(handle)


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


def _stand_guard(read: int, action: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        if not os.read(read, 1):
            action()
        code = 0
    finally:
        os._exit(code)


class SignalPipe:
    """Signals as something to wait for: between two waits they queue, none is lost."""

    def __init__(self, *numbers: int) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in numbers:
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, timeout_s: float | None, *others: int) -> list[int]:
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
        """Undo: for a child that makes its own."""
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
