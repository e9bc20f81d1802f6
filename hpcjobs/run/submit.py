"""From a plan to a running job."""

from __future__ import annotations

import time

import msgspec

from hpcjobs.errors import HpcJobsError, SchedulerDownError
from hpcjobs.files import write_beside
from hpcjobs.job.models import Plan
from hpcjobs.run import folder, index
from hpcjobs.run.handle import JobHandle
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler.connect import connect


def submit(plan: Plan, *, scheduler: Scheduler | None = None) -> JobHandle:
    """Write the run folder, hand the script over, remember the job.

    A refused job leaves nothing behind. Where it is not known whether the scheduler took the job, the
    run folder stays, so that a job which did get through finds it.

    Raises:
        RequestError: the run folder cannot be made.
        SchedulerError: the scheduler refused, or did not answer.
    """
    job = plan.job
    folder.create(plan)
    try:
        taken = (scheduler or connect(job.scheduler, job.slurm_conf)).submit(plan)
    except HpcJobsError as error:
        if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
            folder.remove(plan)
        raise
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
