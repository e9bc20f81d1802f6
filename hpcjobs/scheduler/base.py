"""The interface of every scheduler, and the record of a job that all of them give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from hpcjobs.job.models import Plan
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


class Scheduler(Protocol):
    """Who runs jobs. Each method asks the scheduler at most once, however many jobs it is about."""

    def submit(self, plan: Plan) -> Submitted:
        """Hand over the script that already lies in the plan's run folder."""
        ...

    def queue(self) -> list[JobRecord]:
        """My jobs that have not ended."""
        ...

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """The records of these jobs, ended or not; array jobs give one per task. Unknown ids give none."""
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
