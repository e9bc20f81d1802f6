"""From a plan to a running job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsError, SchedulerDownError
from hpcjobs.files import write_beside
from hpcjobs.job.models import Plan
from hpcjobs.run import folder, index
from hpcjobs.run.handle import JobHandle
from hpcjobs.run.provenance import code_state
from hpcjobs.scheduler.base import Scheduler, Submitted
from hpcjobs.scheduler.connect import connect


def submit(
    plan: Plan, *, scheduler: Scheduler | None = None, prepare: Callable[[Plan], None] | None = None
) -> JobHandle:
    """Write the run folder (``prepare`` adds to it), hand the script over, remember the job.

    A refused job leaves nothing behind. Where it is not known whether the scheduler took the job, the
    run folder stays, so that a job which did get through finds it.

    Raises:
        RequestError: the run folder cannot be made.
        SchedulerError: the scheduler refused, or did not answer.
    """
    folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        if prepare is not None:
            prepare(plan)
        return hand_over(plan, scheduler or connect(plan.job.scheduler, plan.job.slurm_conf))
    except (HpcJobsError, OSError) as error:
        if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
            folder.remove(plan)
        raise


def hand_over(plan: Plan, scheduler: Scheduler) -> JobHandle:
    """Submit the script that lies in the plan's run folder already, and remember the job."""
    return remember(plan, scheduler.submit(plan))


def remember(plan: Plan, taken: Submitted) -> JobHandle:
    """Record that the scheduler has taken the job: in its run folder, then in the index."""
    job = plan.job
    entry = index.Entry(
        job_id=taken.job_id,
        name=job.name,
        site=job.site,
        scheduler=job.scheduler,
        run_dir=str(plan.run_dir),
        submitted=time.time(),
        cluster=taken.cluster,
        slurm_conf=job.slurm_conf,
        array=job.resources.array or None,
    )
    write_beside(plan.run_dir / folder.SUBMITTED, msgspec.json.encode(entry))
    index.add(entry)
    return JobHandle(entry)
