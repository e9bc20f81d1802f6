"""The interface of every scheduler, and the record of a job that all of them give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from hpcjobs.errors import SchedulerError
from hpcjobs.job.models import Job, Plan
from hpcjobs.record.state import State as State
from hpcjobs.scheduler.exit_text import describe_signal, name_signal
from hpcjobs.site.checks import Frozen, Moment


class JobRecord(msgspec.Struct, frozen=True):
    """One job (or one task of an array) as a scheduler or the job itself recorded it; None is "not known".

    Times are seconds since 1970. Run folders keep records: one with fields of a newer hpcjobs is read all the same.
    """

    job_id: str
    """``123``, ``123_4`` (array task), ``123_[5-9]`` (array tasks still pending), ``L7`` (local)."""
    state: State
    source: str
    """Where it was read: ``squeue``, ``sacct``, ``scontrol``, ``job`` (its own state file), ``local``,
    or ``sandbox`` (which was taken down)."""
    name: str | None = None
    reason: str | None = None
    partition: str | None = None
    node_list: str | None = None
    nnodes: int | None = None
    submitted: Moment | None = None
    started: Moment | None = None
    start_estimate: Moment | None = None
    ended: Moment | None = None
    elapsed_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None
    restarts: int | None = None
    command: str | None = None
    """The script that runs: the job.sh of the run folder."""
    user: str | None = None
    time_limit_s: float | None = None
    """As it is now: it can be changed while the job waits or runs."""

    @property
    def signal_name(self) -> str | None:
        """``SIGKILL``; None: no signal ended the job."""
        return None if self.signal is None else name_signal(self.signal)

    @property
    def reported_code(self) -> int | None:
        """The exit code, but for the 0 that Slurm gives a job that did not complete."""
        return None if self.exit_code == 0 and self.state is not State.COMPLETED else self.exit_code

    @property
    def ending(self) -> list[str]:
        """``exit code 3``, ``killed by signal 6 (SIGABRT)``, or both."""
        facts = [] if self.reported_code is None else [f"exit code {self.reported_code}"]
        if self.signal is not None:
            facts.append(describe_signal(self.signal))
        return facts


class Submitted(Frozen, frozen=True):
    """What a scheduler answers to a submission."""

    job_id: str
    cluster: str | None = None
    messages: tuple[str, ...] = ()
    """What it printed for the user beside the id, such as what a centre's job_submit.lua says of the job."""


class Estimate(msgspec.Struct, frozen=True):
    """When a job would start (seconds since 1970), or why the scheduler refuses it. None, None: no estimate."""

    start: float | None = None
    refusal: str | None = None
    messages: tuple[str, ...] = ()
    """What a plugin of the site says of the job."""


class JobQueue(Protocol):
    """A scheduler's jobs. Each method asks the scheduler at most once, however many jobs it is about."""

    def submit(self, plan: Plan) -> Submitted:
        """Submit the script in the plan's run folder."""
        ...

    def queue(self) -> list[JobRecord]:
        """My jobs that have not ended."""
        ...

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """The records of these jobs, ended or not; array jobs give one per task. Unknown ids give none."""
        ...

    def show_jobs(self, job_ids: Collection[str]) -> list[JobRecord]:
        """The jobs that the controller still remembers; one that it has forgotten gives none."""
        ...

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        """The jobs that were given the script in the plan's run folder, ended or not, oldest first.

        Raises:
            SchedulerError: it does not answer, so there may be one.
        """
        ...

    def cancel(self, job_ids: Iterable[str]) -> None:
        """End these jobs."""
        ...


class Scheduler(JobQueue, Protocol):
    """Interface of a scheduler. What it cannot do raises `RequestError`, which names what that is."""

    def history(
        self, user: str, *, job_ids: Collection[str] | None = None, since: float | None = None
    ) -> list[JobRecord]:
        """The jobs of ``user`` with these ids, or that ended after ``since``, however they were submitted."""
        ...

    def hold(self, job_ids: Iterable[str]) -> None:
        """Keep pending jobs from starting."""
        ...

    def release(self, job_ids: Iterable[str]) -> None:
        """Let held jobs start."""
        ...

    def requeue(self, job_ids: Iterable[str]) -> None:
        """Put jobs back into the queue."""
        ...

    def update(self, job_id: str, settings: Sequence[str]) -> None:
        """Change ``Name=value`` settings of a job, by scontrol's names."""
        ...

    def signal(self, job_ids: Iterable[str], name: str, *, batch_script: bool) -> None:
        """Send a signal to the tasks of jobs; with ``batch_script`` to the processes of the script too."""
        ...

    def query(self, argv: Sequence[str]) -> str:
        """What a command of `hpcjobs.slurm_commands` prints that changes nothing."""
        ...

    def follow(self, argv: Sequence[str], each: Callable[[str], None]) -> int:
        """As `query`, for a long answer: ``each`` line is handed on as it comes; the exit code."""
        ...

    def step(self, job_id: str, hosts: Sequence[str], *options: str) -> list[str]:
        """The words before a program that run it on each of ``hosts`` of a running job, beside its tasks."""
        ...

    def estimate(self, job: Job) -> Estimate:
        """When ``job`` would start if it were submitted now."""
        ...


class QueueReadOnce:
    """A scheduler whose queue is read once, also when it does not answer."""

    def __init__(self, scheduler: JobQueue) -> None:
        self._scheduler = scheduler
        self._queue: list[JobRecord] | SchedulerError | None = None
        self.submit, self.cancel, self.find_submitted = scheduler.submit, scheduler.cancel, scheduler.find_submitted
        self.account, self.show_jobs = scheduler.account, scheduler.show_jobs

    def queue(self) -> list[JobRecord]:
        if self._queue is None:
            try:
                self._queue = self._scheduler.queue()
            except SchedulerError as error:
                self._queue = error
        if isinstance(self._queue, SchedulerError):
            raise self._queue
        return self._queue
