"""``python -m hpcjobs.runtime.spawn --ntasks N -- CMD...``: N copies of a command as one world on this machine.

Each copy learns its rank from the environment. The first that fails ends the others, and its exit code
is the answer. Signals that ask a job to end or to save are passed on to every copy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from hpcjobs.processes import tree
from hpcjobs.processes.fork import Guard, SignalPipe, die_with_parent, start_child

GRACE_VARIABLE = "HPCJOBS_GRACE_S"
"""Seconds between SIGTERM and SIGKILL, default: 30, as Slurm's KillWait."""
_USAGE = "usage: python -m hpcjobs.runtime.spawn --ntasks N -- CMD..."
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Tasks:
    """The copies, each the leader of its process group."""

    def __init__(self, command: list[str], ntasks: int) -> None:
        self._codes: dict[int, int | None] = {}
        for rank in range(ntasks):
            self._codes[_start(command, rank, ntasks)] = None

    @property
    def running(self) -> list[int]:
        return [pid for pid, code in self._codes.items() if code is None]

    def update(self) -> int | None:
        """Note the copies that have ended; return the exit code of one that failed since the last call, or None.

        Ended copies stay zombies: no other process gets their process id, so a signal to their group reaches only the
        processes that they left running.
        """
        failed = None
        for pid in self.running:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                code = end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status
                self._codes[pid] = code
                failed = failed or code or None
        return failed

    def send(self, number: int, *, also_ended: bool = False) -> None:
        """Signal the groups of all that run."""
        for pid in self._codes if also_ended else self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def clear(self) -> None:
        """Kill the rest of all groups, and wait for all copies."""
        self.send(signal.SIGKILL, also_ended=True)
        for pid in self._codes:
            os.waitpid(pid, 0)

    def living(self) -> list[int]:
        """All processes of all groups."""
        return tree.in_groups(self._codes)


def _start(command: list[str], rank: int, ntasks: int) -> int:
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        die_with_parent(parent, signal.SIGKILL)

    pid = start_child(command, os.environ | _world(rank, ntasks), prepare)
    # Parent and child both set it, so that the group exists before either continues.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    return pid


def _world(rank: int, ntasks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ntasks),
        "LOCAL_WORLD_SIZE": str(ntasks),
        "NODE_RANK": "0",
    }


def spawn(command: list[str], *, ntasks: int, grace_s: float) -> int:
    """Run the copies to their end; 0, or the exit code of the first that failed (128 + n: by a signal)."""
    signals = SignalPipe(signal.SIGCHLD, *_PASSED_ON)
    tasks = Tasks(command, ntasks)
    guard = Guard(lambda: tree.end(tasks.living, grace_s=grace_s))
    first_failure: int | None = None
    kill_at: float | None = None
    terminated = False
    while True:
        failed = tasks.update()
        if not tasks.running:
            first_failure = first_failure or failed
            break
        if failed is not None and first_failure is None:
            first_failure, kill_at = failed, time.monotonic() + grace_s
            if not terminated:
                tasks.send(signal.SIGTERM)
            terminated = True
        if kill_at is not None and time.monotonic() >= kill_at:
            tasks.send(signal.SIGKILL)
            kill_at = None
        for number in signals.wait(None if kill_at is None else kill_at - time.monotonic()):
            # SIGTERM to a process group may reach this process more than once: the tasks get it once.
            if number in _PASSED_ON and not (number == signal.SIGTERM and terminated):
                tasks.send(number)
                terminated = terminated or number == signal.SIGTERM
    guard.release()
    tasks.clear()
    return first_failure or 0


def main(argv: list[str]) -> int:
    """``--ntasks N`` or ``--ntasks=N``, then ``--``, then the command."""
    end = argv.index("--") if "--" in argv else len(argv)
    option, _, ntasks = "=".join(argv[:end]).partition("=")
    command = argv[end + 1 :]
    if option != "--ntasks" or not ntasks.isdecimal() or int(ntasks) < 1 or not command:
        print(_USAGE, file=sys.stderr)
        return 2
    return spawn(command, ntasks=int(ntasks), grace_s=float(os.environ.get(GRACE_VARIABLE) or 30))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
