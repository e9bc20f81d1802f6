"""Decides which jobs may start now: first come, first served, on one machine's CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hpcjobs.scheduler.local.job_folder import LocalJob
from hpcjobs.scheduler.local.records import Request, Started


class QueuedJob(NamedTuple):
    """A job that has not ended: waiting, running, or an array with tasks still to start."""

    job: LocalJob
    request: Request
    started: Started | None = None
    waiting: tuple[int, ...] | None = None
    """Indices of an array that have not started. None: no array."""

    @property
    def done_starting(self) -> bool:
        return self.started is not None or self.waiting == ()


class Start(NamedTuple):
    """It may start, with these GPUs; of an array: its first waiting task."""

    gpus: tuple[str, ...]


class Wait(NamedTuple):
    """It must wait, for this reason (in Slurm's words), until one of ``watch`` changes."""

    reason: str
    watch: tuple[LocalJob, ...]


class Never(NamedTuple):
    """It never will."""

    reason: str


StartDecision = Start | Wait | Never
Outcome = Callable[[str], str | None]
"""Final state of a job by its id; None: it has not ended."""


class _Machine:
    """CPUs and GPUs in use, while the jobs of the queue are considered one after the other."""

    def __init__(self, running: Iterable[QueuedJob]) -> None:
        self.cpus = 0
        self.gpus: set[str] = set()
        for entry in running:
            if entry.started is not None:
                self.take(entry.request, entry.started.gpus)

    def take(self, request: Request, gpus: Iterable[str]) -> None:
        self.cpus += _slots(request)
        self.gpus.update(gpus)

    def fit(self, request: Request) -> tuple[str, ...] | None:
        """The GPUs it would get; None: it does not fit."""
        names = request.gpu_names if request.gpu_names is not None else map(str, range(request.machine_gpus))
        free = [name for name in names if name not in self.gpus]
        if self.cpus + _slots(request) > request.machine_cpus or len(free) < request.gpus:
            return None
        return tuple(free[: request.gpus])


def _slots(request: Request) -> int:
    """CPUs accounted for: one that asks for more than there are has the machine to itself."""
    return min(request.cpus, request.machine_cpus)


def decide(entries: Iterable[QueuedJob], outcome: Outcome) -> dict[str, StartDecision]:
    """A verdict for every waiting entry, by job id; ``entries`` are in the order of submission.

    Strictly in order: a job that does not fit holds back all behind it, so that a large one is not
    starved by small ones. Jobs that wait for other jobs, or for their own array's limit, hold back no other job.
    """
    entries = list(entries)
    machine = _Machine(entries)
    verdicts: dict[str, StartDecision] = {}
    first: LocalJob | None = None  # the job nearest before that is held back by resources or order
    for entry in entries:
        if entry.done_starting:
            continue
        verdict = _own_verdict(entry, entries, outcome)
        if verdict is None and first is not None:
            verdict = Wait("Priority", (first,))
        elif verdict is None:
            gpus = machine.fit(entry.request)
            running = tuple(e.job for e in entries if e.started is not None)
            verdict = Wait("Resources", running) if gpus is None else Start(gpus)
        if isinstance(verdict, Start):
            held_back = not _take_turn(entry, verdict.gpus, machine, entries)
        else:
            held_back = isinstance(verdict, Wait) and verdict.reason in ("Resources", "Priority")
        first = entry.job if held_back else first
        verdicts[entry.job.job_id] = verdict
    return verdicts


def _take_turn(entry: QueuedJob, gpus: tuple[str, ...], machine: _Machine, entries: Iterable[QueuedJob]) -> bool:
    """Give an entry its slots, an array one for each task it may run; False: a task finds none left."""
    machine.take(entry.request, gpus)
    tasks = len(entry.waiting or (0,))
    if entry.request.throttle is not None:
        tasks = min(tasks, entry.request.throttle - len(_running_tasks(entry, entries)))
    for _ in range(tasks - 1):
        more = machine.fit(entry.request)
        if more is None:
            return False
        machine.take(entry.request, more)
    return True


def _running_tasks(entry: QueuedJob, entries: Iterable[QueuedJob]) -> tuple[LocalJob, ...]:
    return tuple(e.job for e in entries if e.started is not None and e.job.submitted_job == entry.job)


def _own_verdict(entry: QueuedJob, entries: Iterable[QueuedJob], outcome: Outcome) -> StartDecision | None:
    """The verdict of the job's own conditions; None: only slots and order matter."""
    pending = []
    for kind, job_id in entry.request.dependency:
        state = outcome(job_id)
        if state is None:
            pending.append(entry.job._replace(job_id=job_id).submitted_job)
        elif not _MET[kind](state):
            return Never("DependencyNeverSatisfied")
    if pending:
        return Wait("Dependency", tuple(pending))
    own = _running_tasks(entry, entries)
    if entry.request.throttle is not None and len(own) >= entry.request.throttle:
        return Wait("JobArrayTaskLimit", own)
    return None


_MET: Mapping[str, Callable[[str], bool]] = {
    "afterok": lambda state: state == "COMPLETED",
    "afterany": lambda state: True,
    "afternotok": lambda state: state != "COMPLETED",
}
DEPENDENCY_KINDS = tuple(_MET)
