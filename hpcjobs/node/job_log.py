"""What the job's log, which this process writes as well, says about the running attempt."""

import os
import re
import stat
from typing import List

_LAUNCH_FAILED = re.compile(rb"^srun: error: Task launch for \S+ failed on node ([\w.-]+):", re.MULTILINE)
_MOST_BYTES = 1 << 20
"""Of the end of a log: the failure to launch a step is among the last that is written."""
_OWN = "/proc/self/fd/2"


class JobLog:
    """The file behind standard error, from its size at the start of this process on."""

    def __init__(self) -> None:
        self._begin = _size()

    def failed_launches(self) -> List[str]:
        """Nodes on which srun could not start its tasks; none where the log is no file or cannot be read."""
        first = max(self._begin, _size() - _MOST_BYTES)
        try:
            with open(_OWN, "rb") as file:
                file.seek(first)
                names = _LAUNCH_FAILED.findall(file.read(_MOST_BYTES))
        except OSError:
            return []
        return list(dict.fromkeys(name.decode("ascii") for name in names))


def _size() -> int:
    """0 where standard error is no file."""
    try:
        status = os.stat(_OWN)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
