"""Interface of a scheduler on the node: the time left, the cause of an end, another start."""

import math
import os
import time
from abc import ABC, abstractmethod
from subprocess import TimeoutExpired
from typing import Callable, Dict, List, NamedTuple, Optional

from hpcjobs.node import decide
from hpcjobs.processes import start
from hpcjobs.processes.start import Result


class Limit(NamedTuple):
    """A job's time limit, from the scheduler."""

    left_s: float
    """Seconds until the limit when it was read; infinity: no limit."""
    total_s: float


class Clock:
    """The time a job has left, between two answers of the scheduler."""

    def __init__(self, monotonic: Callable[[], float], limit: Optional[Limit]) -> None:
        self._monotonic = monotonic
        self._end, self.total_s = math.inf, math.inf
        self.update(limit)

    def update(self, limit: Optional[Limit]) -> None:
        """Take a new answer; None: there was none, and the one before remains valid."""
        if limit is not None:
            self._end, self.total_s = self._monotonic() + limit.left_s, limit.total_s

    @property
    def left_s(self) -> float:
        return self._end - self._monotonic()


def signal_time_s(*, fixed_s: Optional[int], measured_s: int, total_s: float, warning_s: int) -> float:
    """How long before the limit the program gets its signal.

    The user's value, or the program's measurement, or a quarter of the limit, at most ``warning_s``.
    """
    if fixed_s is not None:
        return fixed_s
    return measured_s or min(total_s / 4, warning_s)


TIMEOUT_S = 30.0
"""slurmctld answers within seconds, or is down."""


Run = Callable[[List[str], Dict[str, str]], Result]


def run(argv: List[str], env: Dict[str, str]) -> Result:
    """Run ``argv`` with exactly ``env``. Exit code 127: it could not be started; 124: it did not end in time."""
    try:
        return start.run(argv, env=env, timeout_s=TIMEOUT_S, errors="replace")
    except OSError as error:
        return Result(127, "", f"{argv[0]}: {error.strerror}")
    except TimeoutExpired:
        return Result(124, "", f"{argv[0]} did not answer within {TIMEOUT_S:.0f} s")


def outside_job(environ: Dict[str, str]) -> Dict[str, str]:
    """``environ`` without Slurm's variables of this job and a user's defaults for Slurm's commands."""
    ours = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_", "SCONTROL_", "HPCJOBS_")
    exceptions = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environ.items() if name in exceptions or not name.startswith(ours)}


KILL_WAIT_S = 30.0
"""Slurm's own default, which most sites leave."""


RESUBMITTED = "resubmitted as"
"""Beginning of the decision that another job continues; its id follows."""


class RestartOutcome(NamedTuple):
    """Result of a request for another attempt."""

    decision: str
    """``requeued``, ``resubmitted as ID``, or ``ended:`` and the reason."""
    job_id: Optional[str] = None
    """Id of the job that continues this one."""


class NodeSideScheduler(ABC):
    """The scheduler as a job on its first node needs it; each method has an answer where the scheduler is silent."""

    job_id = ""
    """As the scheduler's commands want it; a task of an array by its array and index."""
    array_job_id = None  # type: Optional[str]
    """Id of the array, for an array task of Slurm: its raw id does not contain it."""
    restarts = 0
    """How often the scheduler has started this job again."""

    @abstractmethod
    def read_limit(self) -> Optional[Limit]:
        """The current time limit; None: unknown or unchanged."""

    @abstractmethod
    def read_cause(self) -> Optional[str]:
        """Why the scheduler ends this job: a cause, ``running``, ``cancelled`` or ``requeued``."""

    def read_kill_wait_s(self) -> float:
        """How long after SIGTERM the scheduler sends SIGKILL."""
        return KILL_WAIT_S

    def read_queued_at(self) -> Optional[float]:
        """When this start of the job was put into the queue, in seconds since 1970; None: unknown."""
        return None

    @abstractmethod
    def read_earlier_cause(self, job_id: str) -> str:
        """The cause that ended ``job_id`` if its end was not recorded."""

    def node_names(self, nodes: str) -> List[str]:
        """The names in a list of nodes; none where this scheduler has one machine."""
        return []

    @abstractmethod
    def start_again(self, suspects: List[str], *, as_another_job: bool = True) -> RestartOutcome:
        """Start another attempt, if possible without ``suspects``; the newest suspects matter most.

        ``as_another_job``: where this job cannot start again, another one may continue it.
        """

    @abstractmethod
    def hold(self) -> str:
        """Put the job back into the queue, to wait there until its user releases it; a message about it."""


class Local(NodeSideScheduler):
    """The queue of one machine: a supervisor starts the script again, with the CPUs and GPUs that the job has."""

    def __init__(self, environ: Dict[str, str]) -> None:
        self.job_id = environ.get("HPCJOBS_JOB_ID", "")
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._again = environ.get("HPCJOBS_AGAIN", "")
        self._deadline = environ.get("HPCJOBS_DEADLINE", "")
        self._limit: Optional[float] = None

    def read_limit(self) -> Optional[Limit]:
        """Read once: the supervisor's limit never changes, and its clock is this one."""
        if not self._deadline.isdigit() or self._limit is not None:
            return None
        self._limit = float(self._deadline) - time.time()
        return Limit(self._limit, self._limit)

    def read_cause(self) -> Optional[str]:
        return None

    def read_earlier_cause(self, job_id: str) -> str:
        return decide.PREEMPT

    def start_again(self, suspects: List[str], *, as_another_job: bool = True) -> RestartOutcome:
        try:
            os.close(os.open(self._again, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as error:
            return RestartOutcome("ended: {}: {}".format(self._again or "no HPCJOBS_AGAIN", error.strerror))
        return RestartOutcome(decide.CONTINUES)

    def hold(self) -> str:
        return "submit it again when its run folder can be read"
