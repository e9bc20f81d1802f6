"""Where a job stands, by the job itself: ``state.json``, ``first_failure`` (the rank that failed first), and
``attempts.jsonl`` (a line for each attempt that ended).
"""

import contextlib
import os
from enum import Enum
from functools import lru_cache
from typing import List, NamedTuple, Optional, Tuple

from hpcjobs.files import AnyPath, append_lines, read_regular, write_beside
from hpcjobs.record import ATTEMPTS, FIRST_FAILURE, STATE
from hpcjobs.record.values import decode, encode, read_count, read_text


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
    """Read a ``state.json``. Raises OSError: it cannot be read. ValueError: it holds no state of a job."""
    return _decode(read_regular(path))


@lru_cache(maxsize=1024)
def _decode(content: bytes) -> StateFile:
    """Kept: `wait` and `ps` read the same state again and again."""
    state = decode(content, StateFile)
    _check_times(state.started, state.ended)
    return state


def _check_times(started: Optional[float], ended: Optional[float]) -> None:
    """Raises ValueError: one is no time that can be printed."""
    for name, moment in (("started", started), ("ended", ended)):
        if moment is not None and not 0 <= moment < _YEAR_10000:  # also refuses NaN
            raise ValueError(f"{name} is {moment}, expected seconds since 1970")


def write_state(folder: str, state: StateFile) -> None:
    """Replace ``state.json`` of ``folder``. Raises OSError."""
    write_beside(os.path.join(folder, STATE), encode(state) + "\n")


def read_first_failure(folder: str) -> Optional[FirstFailure]:
    """The line ``EXIT_CODE RANK HOST`` that the first failing rank wrote; None: no rank failed, or it is cut short."""
    try:
        code, rank, host = read_text(os.path.join(folder, FIRST_FAILURE)).split()[:3]
    except (OSError, ValueError):
        return None
    of_rank, exit_code = read_count(rank), read_count(code)
    return None if of_rank is None or exit_code is None else FirstFailure(of_rank, host, exit_code)


class Attempt(NamedTuple):
    """One start of a job and its end. Times are seconds since 1970; None: not known."""

    job_id: str
    started: float
    ended: Optional[float]
    nodes: str
    exit_code: Optional[int]
    cause: str
    """``completed``, ``timeout``, ``preempt``, ``node`` or ``error``."""
    steps: int
    """Steps done since the first start."""
    saved: int
    """Saved steps; the next attempt resumes after them."""
    decision: str
    """``requeued``, ``requeued by Slurm``, ``resubmitted as ID``, ``completed``, or ``ended:`` and the reason."""
    restarts: int = 0
    """How often the scheduler had started the job before: hosts whose clocks differ may start it in one second."""

    @property
    def key(self) -> Tuple[str, float, int]:
        """What identifies an attempt."""
        return (self.job_id, self.started, self.restarts)

    @property
    def lost(self) -> int:
        """Steps that were, or would have to be, done again."""
        return 0 if self.cause == "completed" else self.steps - self.saved


class History(NamedTuple):
    """The recorded attempts of a job, oldest first."""

    attempts: List[Attempt]
    unreadable: int = 0
    """Lines that hold no attempt: cut short when the job was killed, say."""


def read_history(run_dir: str) -> History:
    """The history in ``run_dir``; empty before the first end. Raises OSError: it cannot be read."""
    try:
        content = read_regular(os.path.join(run_dir, ATTEMPTS))
    except FileNotFoundError:
        return History([])
    # Zeros: a file server that crashed may leave them where the newest line was to be.
    lines = [line for line in content.split(b"\n") if line.strip(b"\0 \r\t")]
    attempts = []
    for line in lines:
        with contextlib.suppress(ValueError):
            attempt = decode(line, Attempt)
            _check_times(attempt.started, attempt.ended)
            attempts.append(attempt)
    return History(attempts, len(lines) - len(attempts))


def append_attempt(run_dir: str, attempt: Attempt) -> None:
    """Append a line. Raises OSError."""
    append_lines(os.path.join(run_dir, ATTEMPTS), [encode(attempt)])


def find_recorded(history: History, key: Tuple[str, float, int]) -> Optional[Attempt]:
    """The line of the attempt with this `key`, if it is the last one."""
    last = history.attempts[-1] if history.attempts else None
    return last if last is not None and last.key == key else None


def replace_last(run_dir: str, attempt: Attempt) -> None:
    """Correct the line that was appended last. Raises OSError."""
    path = os.path.join(run_dir, ATTEMPTS)
    earlier = read_regular(path).rstrip(b"\n").rpartition(b"\n")
    write_beside(path, earlier[0] + earlier[1] + encode(attempt).encode() + b"\n")


def count_unrecorded(history: History, job_id: str, restarts: int) -> int:
    """How many earlier attempts have no readable line, by the number of times the scheduler restarted ``job_id``."""
    recorded = sum(attempt.job_id == job_id for attempt in history.attempts)
    return max(history.unreadable, restarts - recorded, 0)
