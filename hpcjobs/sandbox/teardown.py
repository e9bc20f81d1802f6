"""Removes a sandbox, complete or partly removed before.

Processes are found by recorded pid and start time, and by their namespaces, with all descendants: a job's processes,
slurmstepd, and daemons without a record.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.processes.programs import run
from hpcjobs.processes.tree import start_ticks
from hpcjobs.sandbox import cgroups, network
from hpcjobs.sandbox.daemons import alive, must, program, recorded_daemons
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.network import has_block, remove_block

_TERM_S, _KILL_S = 3.0, 10.0
_POLL_S = 0.02


def take_down(folder: Folder) -> None:
    """End every process, then remove namespaces, network, names and mounts. The folder's files stay.

    Raises:
        RequestError: called from inside the sandbox.
        HpcJobsError: a process did not end.
    """
    if os.getpid() in processes(folder):
        raise RequestError("this command runs on a host of the sandbox", hint="run it outside")
    folder.record.unlink(missing_ok=True)
    _end_processes(folder)
    cgroups.remove(folder)
    network.remove(folder)
    remove_block(folder)
    _unmount(folder)


def leftovers(folder: Folder) -> tuple[str, ...]:
    """Descriptions of the sandbox's remains on this machine."""
    running, mounted = len(processes(folder)), len(mounts(folder))
    return tuple(
        arguments
        for there, arguments in (
            (running, f"{running} processes"),
            (network.bridge_owner() == str(folder.root), f"bridge {network.BRIDGE}"),
            (mounted, f"{mounted} mounts"),
            (has_block(folder), "lines in /etc/hosts"),
        )
        if there
    )


def _end_processes(folder: Folder) -> None:
    alive = processes(folder)
    for number, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + patience
        signalled: dict[int, int] = {}
        while alive and time.monotonic() < deadline:
            for pid, ticks in alive.items():
                if signalled.get(pid) != ticks:
                    _signal(pid, ticks, number)
                    signalled[pid] = ticks
            time.sleep(_POLL_S)
            alive = processes(folder)
        if not alive:
            for daemon in recorded_daemons(folder):
                _reap(daemon.pid)
            return
    raise HpcJobsError(f"these processes of the sandbox do not end: {', '.join(map(str, sorted(alive)))}")


def processes(folder: Folder) -> dict[int, int]:
    """Every live process of the sandbox: pid -> start time in ticks."""
    pids = {daemon.pid for daemon in recorded_daemons(folder) if alive(daemon)}
    pids |= set(_inside(folder))
    pids |= _descendants(pids)
    ticks_of = {pid: start_ticks(pid) for pid in pids}
    return {pid: ticks for pid, ticks in ticks_of.items() if ticks is not None}


def _inside(folder: Folder) -> Iterator[int]:
    """Processes in one of our namespaces. A file that no namespace is mounted on matches none."""
    ours = {_identity(path) for path in folder.namespaces.glob("*")} - {None}
    for pid in _pids():
        if any(_identity(Path(f"/proc/{pid}/ns/{kind}")) in ours for kind in ("net", "uts")):
            yield pid


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descendants(roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(pid)
    descendants: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = set(children.get(waiting.pop(), ())) - descendants
        descendants |= new
        waiting += new
    return descendants


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _signal(pid: int, ticks: int, number: signal.Signals) -> None:
    """Signal that very process: the descriptor pins it before its start time is compared."""
    if not hasattr(os, "pidfd_open"):  # a Python built against old headers, as conda's
        if start_ticks(pid) == ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if start_ticks(pid) == ticks:
            signal.pidfd_send_signal(descriptor, number)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _reap(pid: int) -> None:
    """A daemon that this process started itself stays a zombie until its exit status is read."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        return


def _unmount(folder: Folder) -> None:
    for point in sorted(mounts(folder), key=lambda path: -len(path.parts)):
        # Lazily if a user's shell is in it: the mount goes now, its memory when they leave.
        if run([program("umount"), str(point)]).code != 0:
            must(["umount", "--lazy", str(point)])


def mounts(folder: Folder) -> list[Path]:
    """Mount points under the folder, one entry for each mount."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]))
        if point.is_relative_to(folder.root):
            points.append(point)
    return points
