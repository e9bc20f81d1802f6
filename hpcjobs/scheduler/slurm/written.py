"""Reads the id that a job of Slurm wrote into its run folder when it started."""

from __future__ import annotations

from hpcjobs.job.models import Plan
from hpcjobs.record.names import STATE
from hpcjobs.record.state import read_state_file
from hpcjobs.scheduler.base import Submitted


def written_jobs(plan: Plan) -> list[Submitted]:
    """The job of the plan's run folder, once its script, or one task of the array, has started.

    Of a task that an older hpcjobs started, the file has the task's own id in Slurm's books, and not the array's.
    """
    pattern = f"*/{STATE}" if plan.job.resources.array else STATE
    for path in plan.run_dir.glob(pattern):
        try:
            written = read_state_file(path)
        except (OSError, ValueError):
            continue  # no state file of a job: the scheduler is asked instead
        if (job_id := written.array_job_id if plan.job.resources.array else written.job_id) is not None:
            return [Submitted(job_id=job_id, cluster=written.cluster or None)]
    return []
