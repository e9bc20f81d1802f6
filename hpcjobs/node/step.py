"""Detects that a job's launcher waits although all its tasks have ended, and ends the step."""

import os
import signal
from typing import Callable, Dict, List, Optional

from hpcjobs.processes import tree
from hpcjobs.record.control import REQUEUE_CODE

ENDED_GRACE_S = 30.0
"""For a launcher after the last task wrote its end: it collects output, and ends its daemons."""
FAILED_GRACE_S = 180.0
"""For the other tasks after one failed: the launcher kills them, which takes Slurm's KillWait and more."""
MISSING_GRACE_S = 60.0
"""For the launcher after the last process of this host's tasks has ended."""


class StepWatch:
    """Decides from the tasks' ends that a step is over although its launcher waits."""

    def __init__(self, tasks: int, monotonic: Callable[[], float], *, agents: bool, may_shrink: bool) -> None:
        self._tasks, self._monotonic = tasks, monotonic
        self._agents, self._may_shrink = agents, may_shrink
        self._since: Dict[str, float] = {}
        self._alive_seen = False

    def problem(self, ends: Dict[int, int], alive: Callable[[], bool]) -> Optional[str]:
        """Why the step should be ended; None: it may go on.

        Args:
            ends: exit codes of the tasks that ended.
            alive: whether a process of a task of this host exists; asked only where it matters.
        """
        if self._tasks == 0:
            return None
        over = {task for task in ends if task < self._tasks}
        if self._lasts("ended", len(over) == self._tasks, ENDED_GRACE_S):
            return "all tasks have ended"
        failed = any(ends[task] != 0 for task in over) and not self._may_shrink
        if self._lasts("failed", failed, FAILED_GRACE_S):
            return f"a task ended {FAILED_GRACE_S:.0f} s ago and the others did not follow"
        if self._agents:  # between two rounds of an agent no rank is alive
            return None
        is_alive = alive()
        self._alive_seen = self._alive_seen or is_alive
        if self._lasts("missing", self._alive_seen and not is_alive, MISSING_GRACE_S):
            return "no process of a task is left on this host"
        return None

    def _lasts(self, what: str, holds: bool, grace_s: float) -> bool:
        if not holds:
            self._since.pop(what, None)
            return False
        return self._monotonic() - self._since.setdefault(what, self._monotonic()) >= grace_s


def code_of(ends: Dict[int, int]) -> int:
    """One exit code for all tasks: the first that is a failure, else 0."""
    return next((code for _, code in sorted(ends.items()) if code not in (0, REQUEUE_CODE)), 0)


def rank_processes(job_id: str) -> List[int]:
    """Processes on this host that belong to a rank of ``job_id``, as far as this user may see."""
    pids = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = set(file.read().split(b"\0"))
        except OSError:
            continue
        if b"HPCJOBS_JOB_ID=" + job_id.encode() in variables and any(
            variable.startswith(b"RANK=") for variable in variables
        ):
            pids.append(pid)
    return pids


def end_launcher(pid: int, number: int = signal.SIGTERM) -> None:
    """Signal the launchers that the script of process ``pid`` waits for."""
    tree.send(tree.children(pid), number)
