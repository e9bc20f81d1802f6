"""Submits a plan as a job; a submitted job in Python."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, SchedulerDownError
from hpcjobs.job.models import Job, Plan
from hpcjobs.record import METRICS, SUMMARY
from hpcjobs.record.metrics import read_lines
from hpcjobs.record.state import Attempt
from hpcjobs.record.summary import read_summary
from hpcjobs.record.values import decode_object
from hpcjobs.run import folder, submission
from hpcjobs.run.budget import count_against_budget
from hpcjobs.run.folder import code_state
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_attempts, read_usable
from hpcjobs.scheduler.base import JobQueue, JobRecord, State, connect
from hpcjobs.site.resources import option_of
from hpcjobs.site.trust import refusal_of_plan

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTE = b"hpcjobs: interrupted: this ends when the scheduler has answered, so that no job is lost\n"


@contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Within the block, signals of `ENDING` are noted in the list given; the first is raised again after it.

    Only the main thread defers signals, because Python runs handlers in the main thread alone.
    """
    received: list[int] = []
    if current_thread() is not main_thread():
        yield received
        return

    def note(number: int, _: object) -> None:
        if not received:
            os.write(2, _NOTE)  # not by print: it may have been interrupted in the middle of printing
        received.append(number)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    handled = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def submit(
    plan: Plan, *, scheduler: JobQueue | None = None, prepare: Callable[[Plan], None] | None = None
) -> JobHandle:
    """Write the run folder (``prepare`` adds to it), hand the script over, remember the job.

    A refused job leaves no files. A submission that a laptop repeats is submitted once: the first job is returned. If
    it is not known whether the scheduler took the job, the run folder stays, so that an accepted job finds it.

    Raises RequestError: no plan was given, the run folder cannot be made, or another cluster would be asked about the
    job. ConfigError: it was made by an untrusted site file or template. SchedulerError: the scheduler refused, or did
    not answer.
    """
    if not isinstance(plan, Plan):
        raise RequestError(f"submit takes a plan, not {plan!r}", hint="hpcjobs.submit(hpcjobs.plan(PROGRAM, ...))")
    if plan.job.untrusted:
        raise refusal_of_plan(plan.job.untrusted)
    if (where := plan.job.sources.get("test_only")) is not None:
        raise RequestError(f"--test-only ({where}): the script is not to be submitted", hint="remove the option")
    _check_cluster(plan.job)
    target = scheduler or connect(plan.job.scheduler, plan.job.slurm_conf)
    once = submission.next_submission()
    if once is None:
        return _submit(plan, target, prepare)
    with submission.finish_without_terminal():
        if (entry := once.find_or_begin(target, plan.run_dir)) is not None:
            at = time.strftime("%F %H:%M:%S", time.localtime(entry.submitted))
            text = f"job {entry.job_id} was submitted at {at} by the same command, whose answer got lost; not again"
            warnings.warn(text, HpcJobsWarning, stacklevel=2)
            return JobHandle(entry)
        try:
            return _submit(plan, target, prepare)
        except HpcJobsError as error:
            if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
                once.forget()
            raise


def _check_cluster(job: Job) -> None:
    """Refuse a job for a cluster that Slurm's other commands would not ask about it.

    Raises RequestError: names the variable to set.
    """
    if not job.kind.takes_sbatch_options or job.rehearsal:
        return
    named = [value for name, value in map(option_of, job.sbatch) if name == "clusters" and value]
    where = f"sbatch clusters={named[-1]} (site {job.site})" if named else "SBATCH_CLUSTERS (environment)"
    clusters = named[-1] if named else os.environ.get("SBATCH_CLUSTERS", "")
    if not clusters or {*clusters.split(",")} <= {*os.environ.get("SLURM_CLUSTERS", "").split(",")}:
        return
    raise RequestError(
        f"{where}: ps, wait and cancel would ask another cluster about the job",
        hint=f"export SLURM_CLUSTERS={clusters}, for every command",
    )


def _submit(plan: Plan, scheduler: JobQueue, prepare: Callable[[Plan], None] | None) -> JobHandle:
    folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        if prepare is not None:
            prepare(plan)
    except BaseException:
        folder.remove(plan)
        raise
    return hand_over(plan, scheduler, refused=folder.remove)


def hand_over(plan: Plan, scheduler: JobQueue, *, refused: Callable[[Plan], None] | None = None) -> JobHandle:
    """Submit the script in the plan's run folder, and record the job.

    A signal that would end this process comes after that: a job that the scheduler has accepted is always recorded.
    ``refused`` is called where no job was accepted.
    """
    with defer_signals() as deferred:
        begun = submission.begin(plan)
        try:
            with count_against_budget(plan.job):
                accepted = scheduler.submit(plan)
        except (HpcJobsError, OSError) as error:
            # Only the answer may be lost: then the next command looks for the job.
            if isinstance(error, SchedulerDownError) and error.maybe_taken:
                submission.keep_begun(begun)
                if deferred:  # the signal, not this error, ends the command
                    text = f"interrupted, and Slurm may have taken job {plan.job.name}: look with `hpcjobs ps`"
                    warnings.warn(text, HpcJobsWarning, stacklevel=2)
            else:
                if refused is not None:
                    refused(plan)
                submission.forget(plan.run_dir)
            raise
        handle = JobHandle(submission.remember(plan, accepted))
        if deferred:
            text = f"interrupted, and job {handle.id} was submitted before: hpcjobs cancel {handle.id} ends it"
            warnings.warn(text, HpcJobsWarning, stacklevel=2)
    return handle


class JobHandle:
    """One job, or one array: ``hpcjobs.submit`` returns it, ``hpcjobs.find(id)`` finds it again.

    Every submission makes one: its methods import modules that a submission does without.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, site={self.entry.site!r}, run_dir={self.entry.run_dir!r})"

    @property
    def id(self) -> str:
        """The scheduler's id."""
        return self.entry.job_id

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.entry.run_dir)

    @property
    def records(self) -> list[JobRecord]:
        """The current state: one record, or one per array task."""
        from hpcjobs.run.status import statuses

        return statuses([self.entry])[0].records

    @property
    def state(self) -> State:
        """The state now; of an array, the first state that is not COMPLETED."""
        states = [record.state for record in self.records]
        return next((state for state in states if state is not State.COMPLETED), states[0])

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the job has ended; its exit code. Raises TimeoutError: ``timeout_s`` seconds have passed."""
        from hpcjobs.run import wait

        return wait.exit_code(wait.wait([self.entry], timeout_s=timeout_s))

    @property
    def attempts(self) -> list[Attempt]:
        """Each start of a job with ``retries``: its end, cause and decision; oldest first."""
        return read_attempts(self.run_dir)

    def cancel(self) -> None:
        """End the job; no error if it has ended."""
        from hpcjobs.run.control import cancel

        cancel([self.entry])

    def logs(self, *, rank: int | None = None) -> str:
        """The output of the job until now, or the output of one rank."""
        from hpcjobs.run import logs

        return "".join(logs.lines(self.entry, rank=rank))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; empty when the program writes none."""
        path = self.run_dir / METRICS
        return list(filter(None, map(decode_object, read_lines(path)))) if path.exists() else []

    def summary(self) -> dict[str, Any] | None:
        """summary.json; None when the program has not written one, or, with a warning, none that can be used."""
        path = self.run_dir / SUMMARY
        return read_usable(path, lambda: read_summary(path))


def find(name: str | int | Path, *, site: str | None = None) -> JobHandle:
    """The job that ``name`` stands for: an id, an array task, a run folder, or a name (the newest of that name).

    Raises UnknownJobError: no job has this name. RequestError: it names several jobs, or two sites gave this id out.
    """
    from hpcjobs.run.select import select_one

    return JobHandle(select_one(str(name), site=site))
