"""Finds the processes of a job on this machine, and ends them.

Every job and every launch loads this module, so it imports no module that is slow to load (``typing``).
"""

import contextlib
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    Leader = tuple[int, int, str]
    """A process, told apart from a later one with the same number: pid, start in clock ticks, `boot_id`."""
else:
    Leader = tuple

MARK = "HPCJOBS_LOCAL_JOB"
"""Variable with the job's folder, in every process of a job, also in processes that left its session."""
_KILL_ROUNDS, _KILL_WAIT_S = 5, 2.0


class Process:
    """One line of the kernel's process table, from the state on."""

    __slots__ = ("group", "pid", "ppid", "session", "start_ticks")

    def __init__(self, pid: int, fields: "list[bytes]") -> None:
        self.pid = pid
        self.ppid, self.group, self.session = (int(field) for field in fields[1:4])
        self.start_ticks = int(fields[19])


def identity(pid: int) -> "Leader | None":
    """The identity of the process that now has the number ``pid``; None: it has ended."""
    process = _read(pid)
    return None if process is None else (pid, process.start_ticks, boot_id())


def start_ticks(pid: int) -> "int | None":
    """When ``pid`` started, in clock ticks from the start of the machine; None: it has ended."""
    process = _read(pid)
    return None if process is None else process.start_ticks


def boot_id() -> str:
    """Changes with every start of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _read(pid: int) -> "Process | None":
    """The process ``pid``; None: it has ended, also if it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, fields)


def parent(pid: int) -> "int | None":
    """The process that ``pid`` is a child of; None: it has ended."""
    process = _read(pid)
    return None if process is None else process.ppid


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    return _read(pid) is not None


def children(pid: int) -> "list[int]":
    """Living child processes of ``pid``."""
    return [process.pid for process in _table() if process.ppid == pid]


def reap() -> bool:
    """Wait for the children that have ended; whether any is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _table() -> "Iterator[Process]":
    for name in os.listdir("/proc"):
        process = _read(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def _mark(pid: int) -> "bytes | None":
    """The job's folder in the environment of ``pid``; None: not set, or not readable by this user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    prefix = MARK.encode() + b"="
    return next((entry[len(prefix) :] for entry in entries if entry.startswith(prefix)), None)


def in_groups(groups: "Collection[int]") -> "list[int]":
    """Living processes of these process groups."""
    return [process.pid for process in _table() if process.group in groups]


def members(folder: str, leader: "Leader | None", *, adopted_by: "int | None" = None) -> "list[int]":
    """Living processes of the job in ``folder``.

    They carry its mark; or they are in the session of ``leader``, as long as that is the process that
    was recorded; or they descend from ``adopted_by`` (the supervisor) and carry no other job's mark.
    """
    table, mine = list(_table()), os.fsencode(folder)
    marks = {process.pid: _mark(process.pid) for process in table}
    pids = {pid for pid, mark in marks.items() if mark == mine}
    if leader is not None and identity(leader[0]) == leader:
        pids |= {process.pid for process in table if process.session == leader[0]}
    if adopted_by is not None:
        pids |= _descendants(adopted_by, table, lambda pid: marks[pid] in (None, mine))
    return sorted(pids - {os.getpid()})


def _descendants(root: int, table: "Iterable[Process]", counts: "Callable[[int], bool]") -> "set[int]":
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.ppid, []).append(process.pid)
    descendants: set[int] = set()
    todo = [root]
    while todo:
        new = [pid for pid in children.get(todo.pop(), ()) if pid not in descendants and counts(pid)]
        descendants.update(new)
        todo += new
    return descendants


def send(pids: "Iterable[int]", number: int) -> None:
    """Signal each process that is still there and ours."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(living: "Callable[[], list[int]]", *, grace_s: float) -> None:
    """Send SIGTERM to all ``living`` processes, and after ``grace_s`` SIGKILL until none lives."""
    if grace_s > 0:
        pids = living()
        send(pids, signal.SIGTERM)
        await_end(pids, grace_s)
    for _ in range(_KILL_ROUNDS):
        pids = living()
        if not pids:
            return
        send(pids, signal.SIGKILL)
        await_end(pids, _KILL_WAIT_S)


def await_end(pids: "Iterable[int]", timeout_s: float) -> None:
    """Return when all ``pids`` have ended or the time is over. They need not be children."""
    until = time.monotonic() + timeout_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except (OSError, AttributeError):  # Linux before 5.3, or a Python built against its headers (conda's)
            while _read(pid) is not None and time.monotonic() < until:
                time.sleep(0.02)
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        finally:
            os.close(handle)
