"""Submits a plan as a job."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, SchedulerDownError
from hpcjobs.files import write_beside
from hpcjobs.job.models import Job, Plan
from hpcjobs.run import folder, index
from hpcjobs.run.handle import JobHandle
from hpcjobs.run.identity import own_cluster, user_name
from hpcjobs.run.provenance import code_state
from hpcjobs.scheduler.base import Scheduler, Submitted
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.sbatch import option_of
from hpcjobs.site.trust import refusal_of_plan


def submit(
    plan: Plan, *, scheduler: Scheduler | None = None, prepare: Callable[[Plan], None] | None = None
) -> JobHandle:
    """Write the run folder (``prepare`` adds to it), hand the script over, remember the job.

    A refused job leaves nothing behind. What a laptop sends twice is submitted once: the job of the first time is
    returned. Where it is not known whether the scheduler took the job, the run folder stays, so that a job which did
    get through finds it.

    Raises:
        RequestError: this is no plan, the run folder cannot be made, or another cluster would be asked about the job.
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
    from hpcjobs.run import submission  # it finds the job of a run folder, and so imports this module

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
    if job.scheduler != "slurm" or job.rehearsal:
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


def _submit(plan: Plan, scheduler: Scheduler, prepare: Callable[[Plan], None] | None) -> JobHandle:
    folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        if prepare is not None:
            prepare(plan)
        accepted = scheduler.submit(plan)
    except (HpcJobsError, OSError) as error:
        if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
            folder.remove(plan)
        raise
    return remember(plan, accepted)


def hand_over(plan: Plan, scheduler: Scheduler) -> JobHandle:
    """Submit the script that lies in the plan's run folder already, and remember the job."""
    return remember(plan, scheduler.submit(plan))


def remember(plan: Plan, taken: Submitted) -> JobHandle:
    """Record that the scheduler has accepted the job: in its run folder, then in the index.

    The job runs whether that can be written or not: what cannot is a warning, and either record is enough. What the
    scheduler printed for the user is a warning too.
    """
    job = plan.job
    for message in taken.messages:
        warnings.warn(message, HpcJobsWarning, stacklevel=2)
    entry = index.Entry(
        job_id=taken.job_id,
        name=job.name,
        site=job.site,
        scheduler=job.scheduler,
        run_dir=str(plan.run_dir),
        submitted=time.time(),
        cluster=taken.cluster or own_cluster(job.scheduler, job.slurm_conf),
        slurm_conf=job.slurm_conf,
        array=job.resources.array or None,
        user=user_name(),
    )
    try:
        write_beside(plan.run_dir / folder.SUBMITTED, msgspec.json.encode(entry))
    except OSError as error:
        _warn(entry, f"in its run folder {plan.run_dir}", error)
    try:
        index.add(entry)
    except OSError as error:
        _warn(entry, f"in the list of jobs {index.index_dir()}; name it by its run folder {plan.run_dir}", error)
    return JobHandle(entry)


def _warn(entry: index.Entry, where: str, error: OSError) -> None:
    reason = error.strerror or str(error)
    warnings.warn(
        f"job {entry.job_id} was accepted, but could not be recorded {where}: {reason}", HpcJobsWarning, stacklevel=3
    )
