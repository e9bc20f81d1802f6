"""``state.json`` and ``first_failure``: where a job stands, and the rank that failed first, by the job itself."""

import os
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Optional

from hpcjobs.files import AnyPath, read_regular, write_beside
from hpcjobs.record.names import FIRST_FAILURE, STATE
from hpcjobs.record.text import read_text
from hpcjobs.record.values import decode, encode


class State(str, Enum):
    """State of a job, by Slurm's names."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    REQUEUED = "REQUEUED"
    RESIZING = "RESIZING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DEADLINE = "DEADLINE"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        """No further change is to come (REQUEUED is a job on its way back to the queue)."""
        return self in _ENDED

    @classmethod
    def parse(cls, text: str) -> "State":
        """``CANCELLED by 1000`` or ``COMPLETED+`` -> the state; an unknown name is UNKNOWN."""
        name = (text.split() or [""])[0].rstrip("+")
        return _LONG_NAMES.get(name) or cls.__members__.get(name, cls.UNKNOWN)


_ENDED = frozenset(
    {
        State.COMPLETED,
        State.FAILED,
        State.CANCELLED,
        State.TIMEOUT,
        State.PREEMPTED,
        State.NODE_FAIL,
        State.BOOT_FAIL,
        State.LAUNCH_FAILED,
        State.RECONFIG_FAIL,
        State.OUT_OF_MEMORY,
        State.DEADLINE,
        State.REVOKED,
    }
)
# States the queue shows for a job that is still where the value says.
_LONG_NAMES = {
    "REQUEUE_HOLD": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "SPECIAL_EXIT": State.PENDING,
    "EXPEDITING": State.PENDING,
    "STAGE_OUT": State.COMPLETING,
    "SIGNALING": State.RUNNING,
}


_YEAR_10000 = 253402300800  # in seconds since 1970; `datetime` ends before it


class FirstFailure(NamedTuple):
    """The rank that failed first."""

    rank: int
    host: str
    exit_code: int


class StateFile(NamedTuple):
    """The content of ``state.json``. Times are seconds since 1970."""

    job_id: str
    state: State
    exit_code: Optional[int]
    started: Optional[float]
    ended: Optional[float]
    nodes: Optional[str]
    restarts: int = 0
    first_failure: Optional[FirstFailure] = None
    cluster: Optional[str] = None
    """SLURM_CLUSTER_NAME of the job; empty where Slurm does not set it."""
    array_job_id: Optional[str] = None
    """Id of the array, for an array task; ``job_id`` is the task's raw id in Slurm's accounting."""
    schema: int = 1


def read_state_file(path: AnyPath) -> StateFile:
    """Read a ``state.json``.

    Raises:
        OSError: it cannot be read. ValueError: it holds no state of a job.
    """
    return _decode(read_regular(path))


@lru_cache(maxsize=1024)
def _decode(content: bytes) -> StateFile:
    """Kept: `wait` and `ps` read the same state again and again."""
    state = decode(content, StateFile)
    for name, moment in (("started", state.started), ("ended", state.ended)):
        if moment is not None and not 0 <= moment < _YEAR_10000:  # also refuses NaN
            raise ValueError(f"{name} is {moment}, expected seconds since 1970")
    return state


def write_state(folder: str, state: StateFile) -> None:
    """Replace ``state.json`` of ``folder``. Raises OSError."""
    write_beside(os.path.join(folder, STATE), encode(state) + "\n")


def read_first_failure(folder: str) -> Optional[FirstFailure]:
    """The line ``EXIT_CODE RANK HOST`` that the first failing rank wrote; None: no rank failed, or it is cut short."""
    try:
        code, rank, host = read_text(os.path.join(folder, FIRST_FAILURE)).split()[:3]
        return FirstFailure(int(rank), host, int(code))
    except (OSError, ValueError):
        return None
