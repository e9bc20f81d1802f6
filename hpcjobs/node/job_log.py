"""What the job's log, which this process writes as well, says about the running attempt."""

import os
import re
import stat
from typing import List

from hpcjobs import gpu_errors

_LAUNCH_FAILED = re.compile(rb"^srun: error: Task launch for \S+ failed on node ([\w.-]+):", re.MULTILINE)
_GPU_FAULTS = [re.compile(kind.pattern.encode("ascii")) for kind in gpu_errors.KINDS if kind.effect == gpu_errors.FAULT]
_MOST_BYTES = 1 << 20
"""Of the end of a log: the failure to launch a step is among the last that is written."""
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

    def _read_end(self) -> bytes:
        """The end of what this attempt wrote; empty where the log is no file or cannot be read."""
        first = max(self._begin, _size() - _MOST_BYTES)
        try:
            with open(_OWN, "rb") as file:
                file.seek(first)
                return file.read(_MOST_BYTES)
        except OSError:
            return b""


def _size() -> int:
    """0 where standard error is no file."""
    try:
        status = os.stat(_OWN)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
