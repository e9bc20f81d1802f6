"""The interface of every scheduler, and the record of a job that all of them give."""

from __future__ import annotations

import importlib
import os
import re
import signal as signals
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from hpcjobs.errors import SchedulerError
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.programs import Runner, run
from hpcjobs.record.state import State as State
from hpcjobs.scheduler_kind import KINDS, find_kind
from hpcjobs.site.checks import Frozen, Moment
from hpcjobs.site.machine import EVERY_CLUSTER, cluster_name, named_clusters

_HELD = re.compile(r"JobHeld\w+|JobHoldMaxRequeue|[^,]*[ _]held([ _]state)?")
"""JobHeldUser, JobHeldAdmin, ``job requeued in held state``, ``launch failed requeued held``."""


class JobRecord(msgspec.Struct, frozen=True):
    """One job (or one task of an array) as a scheduler or the job itself recorded it; None is "not known".

    Times are seconds since 1970. Run folders keep records; a record with fields of a newer hpcjobs can be read.
    """

    job_id: str
    """``123``, ``123_4`` (array task), ``123_[5-9]`` (array tasks still pending), ``L7`` (local)."""
    state: State
    source: str
    """Its origin: ``squeue``, ``sacct``, ``scontrol``, ``job`` (the job's state file), ``local``,
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
    """The script that runs, the job.sh of the run folder; None where it is not known for sure."""
    user: str | None = None
    time_limit_s: float | None = None
    """As it is now: it can be changed while the job waits or runs."""

    @property
    def is_held(self) -> bool:
        """Whether it waits for its release: of tasks that squeue lists in one row, all of them."""
        reasons = (self.reason or "").split(",")
        return self.state is State.PENDING and all(_HELD.fullmatch(reason.strip()) for reason in reasons)

    @property
    def signal_name(self) -> str | None:
        """``SIGKILL``; None: no signal ended the job."""
        return None if self.signal is None else name_signal(self.signal)

    @property
    def reported_code(self) -> int | None:
        """The exit code; None for the 0 that Slurm gives a job that did not complete."""
        return None if self.exit_code == 0 and self.state is not State.COMPLETED else self.exit_code

    @property
    def ending(self) -> list[str]:
        """``exit code 3``, ``killed by signal 6 (SIGABRT)``, or both."""
        facts = [] if self.reported_code is None else [f"exit code {self.reported_code}"]
        if self.signal is not None:
            text = describe_signal(self.signal)
            # Slurm itself ends a job that is cancelled or at its limit: a usual cause of the signal is none of it.
            facts.append(text.partition(", ")[0] if self.state in (State.CANCELLED, State.TIMEOUT) else text)
        return facts


class Submitted(Frozen, frozen=True):
    """A scheduler's answer to a submission."""

    job_id: str
    cluster: str | None = None
    messages: tuple[str, ...] = ()
    """Messages of the scheduler for the user, for example of a centre's job_submit.lua."""


class Estimate(msgspec.Struct, frozen=True):
    """When a job would start (seconds since 1970), or why the scheduler refuses it. None, None: no estimate."""

    start: float | None = None
    refusal: str | None = None
    messages: tuple[str, ...] = ()
    """Messages of the site's plugin about the job."""
    partition: str | None = None
    """The partition that it would start in; None: not known."""


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

        Raises SchedulerError: it does not answer, so there may be one.
        """
        ...

    def cancel(self, job_ids: Iterable[str]) -> None:
        """End these jobs."""
        ...


class Scheduler(JobQueue, Protocol):
    """Interface of a scheduler. A verb that it lacks raises `RequestError` with the verb's name."""

    def forget(self, job_ids: Iterable[str]) -> None:
        """Remove the scheduler's own files of jobs that have ended, if they are the user's to remove."""
        ...

    def has_accounting(self) -> bool:
        """Whether an end that ``account`` lacks may be there later: not where no accounting is kept."""
        ...

    def history(
        self, user: str, *, job_ids: Collection[str] | None = None, since: float | None = None
    ) -> list[JobRecord]:
        """The jobs of ``user`` with these ids, or that ended after ``since``, however they were submitted."""
        ...

    def full_id(self, number: str, user: str) -> str | None:
        """The id of the array task or component whose SLURM_JOB_ID is ``number``: ``204`` -> ``200_3``."""
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

    def query(self, argv: Sequence[str], *, cwd: str | None = None) -> str:
        """Output of a command of `hpcjobs.slurm_commands` that only reads, run in ``cwd``."""
        ...

    def follow(self, argv: Sequence[str], each: Callable[[str], None]) -> int:
        """As `query`, for a long answer: ``each`` line is handed on as it comes; the exit code."""
        ...

    def step(self, job_id: str, hosts: Sequence[str], *options: str) -> list[str]:
        """The command before a program that runs it once on each of ``hosts`` in a running job."""
        ...

    def estimate(self, job: Job) -> Estimate:
        """When ``job`` would start if it were submitted now."""
        ...


class QueueReadOnce:
    """A scheduler that reads its queue once, and repeats the error if that fails."""

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

    def queue_again(self) -> list[JobRecord]:
        """The queue as it is now."""
        return self._scheduler.queue()


_USUAL_CAUSES = {
    signals.SIGKILL: "often out of memory",
    signals.SIGSEGV: "a memory error in compiled code",
    signals.SIGBUS: "often a full /dev/shm, or a file that was cut short",
    signals.SIGILL: "often a program built for another CPU",
    signals.SIGABRT: "the program gave up by itself",
    signals.SIGFPE: "a division by zero in compiled code",
    signals.SIGXCPU: "its limit of CPU time",
    signals.SIGXFSZ: "its limit of file size",
}


SLURM_OUT_OF_MEMORY = 125
"""The signal number that Slurm reports after a memory limit was exceeded; no real signal has it."""


def name_signal(number: int) -> str:
    """``SIGKILL``; ``signal 99`` where the number has no name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_signal(number: int) -> str:
    """``killed by signal 9 (SIGKILL), often out of memory``."""
    if number == SLURM_OUT_OF_MEMORY:
        return "killed by Slurm, out of memory"
    name = name_signal(number)
    cause = next((f", {cause}" for usual, cause in _USUAL_CAUSES.items() if usual == number), "")
    return f"killed by signal {number}{f' ({name})' if name.startswith('SIG') else ''}{cause}"


def signal_of(exit_code: int | None, signal: int | None = None) -> int | None:
    """The signal that ended a process, from Slurm or from a shell's exit code (128 + signal); None: no signal."""
    if signal:
        return signal
    number = (exit_code or 0) - 128
    return number if number in set(signals.Signals) else None


def describe_exit(exit_code: int | None, signal: int | None = None) -> str:
    """``exit code 3``, or ``killed by signal 9 (SIGKILL), often out of memory``; empty: unknown."""
    number = signal_of(exit_code, signal)
    if number is not None:
        return describe_signal(number)
    return "" if exit_code is None else f"exit code {exit_code}"


def choose_colour(state: State) -> str:
    """The colour of a state, by a name that rich knows; empty for none."""
    if state is State.COMPLETED:
        return "green"
    if state in (State.CANCELLED, State.PREEMPTED, State.REVOKED):
        return "magenta"
    if state.ended:
        return "red"
    return "cyan" if state is State.RUNNING else "" if state is State.UNKNOWN else "yellow"


Report = Callable[[str], None]
_T = TypeVar("_T")


def discard(line: str) -> None:
    """Ignore the message, for callers that report none."""


class Outage:
    """Questions to a scheduler over a long time: after its first answer no error of it ends the waiting.

    The first error of an outage is reported, and so is the end of the outage.
    """

    def __init__(self, report: Report = discard) -> None:
        self._report = report
        self._has_answered = self.lasts = False

    def ask(self, question: Callable[[], _T]) -> _T | None:
        """The answer; None during an outage.

        Raises SchedulerError: the scheduler has never answered yet.
        """
        try:
            answer = question()
        except SchedulerError as error:
            if not self._has_answered:
                raise
            if not self.lasts:
                self._report(f"the scheduler does not answer; waiting goes on: {error.message}")
            self.lasts = True
            return None
        if self.lasts:
            self._report("the scheduler answers again")
        self._has_answered, self.lasts = True, False
        return answer


def connect(kind: str, slurm_conf: str | None = None, *, runner: Runner = run) -> Scheduler:
    """The scheduler of a kind in `KINDS`, by ``connect`` of its module ``client``; no command is started yet."""
    client = importlib.import_module(f"hpcjobs.scheduler.{kind if kind in KINDS else 'slurm'}.client")
    scheduler: Scheduler = client.connect(slurm_conf, runner=runner)
    return scheduler


def reachable_clusters(scheduler: str, slurm_conf: str | None) -> frozenset[str]:
    """The clusters that ``scheduler`` can query from here; empty: their name is unknown.

    Two clusters, or two workstations, may share one home and give out the same job ids: the name distinguishes them.
    For the queue of this machine that is this host. For Slurm it is the ClusterName; SLURM_CLUSTERS replaces it.
    """
    if not find_kind(scheduler).has_nodes:
        return frozenset((os.uname().nodename,))
    if named := named_clusters():
        return frozenset() if EVERY_CLUSTER in named else named
    name = cluster_name(slurm_conf or os.environ.get("SLURM_CONF"))
    return frozenset(() if name is None else (name,))
