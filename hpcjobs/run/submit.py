"""Submits a plan as a job."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, SchedulerDownError
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.deferred import defer_signals
from hpcjobs.run import folder, submission
from hpcjobs.run.budget import count_against_budget
from hpcjobs.run.folder import code_state
from hpcjobs.run.handle import JobHandle
from hpcjobs.scheduler.base import JobQueue
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.resources import option_of
from hpcjobs.site.trust import refusal_of_plan


def submit(
    plan: Plan, *, scheduler: JobQueue | None = None, prepare: Callable[[Plan], None] | None = None
) -> JobHandle:
    """Write the run folder (``prepare`` adds to it), hand the script over, remember the job.

    A refused job leaves no files. A submission that a laptop repeats is submitted once: the first job is returned. If
    it is not known whether the scheduler took the job, the run folder stays, so that an accepted job finds it.

    Raises:
        RequestError: no plan was given, the run folder cannot be made, or another cluster would be asked about the job.
        ConfigError: it was made by an untrusted site file or template.
        SchedulerError: the scheduler refused, or did not answer.
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
        if (entry := once.find_job(target)) is not None:
            at = time.strftime("%F %H:%M:%S", time.localtime(entry.submitted))
            text = f"job {entry.job_id} was submitted at {at} by the same command, whose answer got lost; not again"
            warnings.warn(text, HpcJobsWarning, stacklevel=2)
            return JobHandle(entry)
        once.begin(plan.run_dir)
        try:
            return _submit(plan, target, prepare)
        except HpcJobsError as error:
            if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
                once.forget()
            raise


def _check_cluster(job: Job) -> None:
    """Refuse a job for a cluster that Slurm's other commands would not ask about it.

    Raises:
        RequestError: names the variable to set.
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
            if isinstance(error, SchedulerDownError) and error.maybe_taken:
                submission.keep_begun(begun)
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
