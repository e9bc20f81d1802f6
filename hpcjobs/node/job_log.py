"""Reads what the job's log, which this process writes as well, says about the running attempt."""

import os
import re
import stat
from typing import List, Optional

from hpcjobs import gpu_errors

_LAUNCH_FAILED = re.compile(rb"^srun: error: Task launch for \S+ failed on node ([\w.-]+):", re.MULTILINE)
_GPU_FAULTS = [re.compile(kind.pattern.encode("ascii")) for kind in gpu_errors.KINDS if kind.effect == gpu_errors.FAULT]
_MOST_BYTES = 1 << 20
"""Of the end of a log: the failure to launch a step is among the last that is written."""
_ERROR_LINES = 200
"""Of the rank that failed first: a traceback with the C++ stack below it. An error further up is one that the program
coped with."""
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
        """Nodes on which srun could not start its tasks; none where the log is no file or cannot be read."""
        names = _LAUNCH_FAILED.findall(self._read_end())
        return list(dict.fromkeys(name.decode("ascii") for name in names))

    def names_gpu_fault(self) -> bool:
        """Whether a program printed that a GPU has a fault; False where the log cannot be read."""
        text = self._read_end()
        return any(fault.search(text) for fault in _GPU_FAULTS)

    def find_configuration_error(self, rank: Optional[int]) -> Optional[gpu_errors.GpuError]:
        """The error by which ``rank`` ended, if it is one that another attempt would meet too.

        Where no line is marked as this rank's, the last lines of all count; None also where the log cannot be read.
        """
        lines = self._read_end().decode("utf-8", "replace").split("\n")
        own = [line for line in lines if re.match(rf" *0*{rank}: ", line)] or lines
        errors = [line for line in own[-_ERROR_LINES:] if not _WARNING.search(line)]
        kind = gpu_errors.classify("\n".join(_since_error(errors)))
        return kind if kind is not None and kind.effect == gpu_errors.CONFIGURATION else None

    def _read_end(self) -> bytes:
        """The end of what this attempt wrote; empty where the log is no file or cannot be read."""
        first = max(self._begin, _size() - _MOST_BYTES)
        try:
            with open(_OWN, "rb") as file:
                file.seek(first)
                return file.read(_MOST_BYTES)
        except OSError:
            return b""


def _since_error(lines: List[str]) -> List[str]:
    """From the traceback on that ended the program, so that one is left out that it coped with; else all lines."""
    end = len(lines)
    for first in reversed(range(len(lines))):
        if not _TRACEBACK.search(lines[first]):
            continue
        # The line that announces a traceback stands before it, in a chain with an empty one between.
        if not _FOLLOWS.search("\n".join(lines[max(0, first - 2) : end])):
            return lines[first:]
        end = first
    return lines


def _size() -> int:
    """0 where standard error is no file."""
    try:
        status = os.stat(_OWN)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
