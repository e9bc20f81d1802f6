"""Evidence about a job's step: ends and processes of its tasks, and the job's log."""

import os
import re
import stat
from typing import Callable, Dict, List, Optional

from hpcjobs import gpu_errors
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
    """One exit code for all tasks: the first failure, or 0."""
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


_LAUNCH_FAILED = re.compile(rb"^srun: error: Task launch for \S+ failed on node ([\w.-]+):", re.MULTILINE)
_GPU_FAULTS = [re.compile(kind.pattern.encode("ascii")) for kind in gpu_errors.KINDS if kind.effect == gpu_errors.FAULT]
_MOST_BYTES = 1 << 20
"""Bytes at the end of a log that are read: a failed launch is among the last lines."""
_ERROR_LINES = 200
"""Lines of the rank that failed first: a traceback with its C++ stack. The program handled errors further up."""
_WARNING = re.compile(r"(?i)warning: ?")
"""torch warns of a driver that is too old, and trains on the CPU."""
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FOLLOWS = re.compile(
    r"During handling of the above|direct cause of the following|Exception ignored in|Error in atexit|ChildFailedError"
)
"""With a traceback that has followed from the one before it: of a chain, of an object's end, of torchrun."""
_OWN = "/proc/self/fd/2"


class JobLog:
    """The file behind standard error, from its size at the start of this process on."""

    def __init__(self) -> None:
        self._begin = _size()

    def failed_launches(self) -> List[str]:
        """Nodes where srun could not start its tasks; empty if the log cannot be read."""
        names = _LAUNCH_FAILED.findall(self._read_end())
        return list(dict.fromkeys(name.decode("ascii") for name in names))

    def names_gpu_fault(self) -> bool:
        """Whether a program printed that a GPU has a fault; False where the log cannot be read."""
        text = self._read_end()
        return any(fault.search(text) for fault in _GPU_FAULTS)

    def find_configuration_error(self, rank: Optional[int]) -> Optional[gpu_errors.GpuError]:
        """The error that ended ``rank``, if another attempt would meet it too.

        Where no line is marked as this rank's, the last lines of all count; None also where the log cannot be read.
        """
        lines = self._read_end().decode("utf-8", "replace").split("\n")
        own = [line for line in lines if re.match(rf" *0*{rank}: ", line)] or lines
        errors = [line for line in own[-_ERROR_LINES:] if not _WARNING.search(line)]
        kind = gpu_errors.classify("\n".join(_since_error(errors)))
        return kind if kind is not None and kind.effect == gpu_errors.CONFIGURATION else None

    def _read_end(self) -> bytes:
        """The end of this attempt's log; empty if it cannot be read."""
        first = max(self._begin, _size() - _MOST_BYTES)
        try:
            with open(_OWN, "rb") as file:
                file.seek(first)
                return file.read(_MOST_BYTES)
        except OSError:
            return b""


def _since_error(lines: List[str]) -> List[str]:
    """Lines from the traceback that ended the program, without handled ones before it, or all lines."""
    end = len(lines)
    for first in reversed(range(len(lines))):
        if not _TRACEBACK.search(lines[first]):
            continue
        # The line that announces a traceback comes before it; in a chain, after an empty line.
        if not _FOLLOWS.search("\n".join(lines[max(0, first - 2) : end])):
            return lines[first:]
        end = first
    return lines


def _size() -> int:
    """0 if standard error is not a file."""
    try:
        status = os.stat(_OWN)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
