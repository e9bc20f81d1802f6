"""Reads the id that a job of Slurm wrote into its run folder when it started."""

from __future__ import annotations

import msgspec

from hpcjobs.job.models import Plan
from hpcjobs.scheduler.base import Submitted


class _Written(msgspec.Struct):
    """The part of ``state.json`` that names the job."""

    job_id: str
    array_job_id: str | None = None
    cluster: str | None = None


def written_jobs(plan: Plan) -> list[Submitted]:
    """The job of the plan's run folder, once its script, or one task of the array, has started.

    Of a task that an older hpcjobs started, the file has the task's own id in Slurm's books, and not the array's.
    """
    pattern = "*/state.json" if plan.job.resources.array else "state.json"
    for path in plan.run_dir.glob(pattern):
        try:
            written = msgspec.json.decode(path.read_bytes(), type=_Written)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue  # no state file of a job: the scheduler is asked instead
        if (job_id := written.array_job_id if plan.job.resources.array else written.job_id) is not None:
            return [Submitted(job_id=job_id, cluster=written.cluster or None)]
    return []
