"""Finds the job of a run folder whose submitter may have been killed before it recorded that job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcjobs.job.models import Job, Plan
from hpcjobs.run.folder import MANIFEST, STATE, SUBMITTED
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import StateFile, read_json
from hpcjobs.run.submit import remember
from hpcjobs.scheduler.base import Scheduler, Submitted


class _FoundManifest(msgspec.Struct):
    """The parts of manifest.json that make the plan again."""

    job: Job
    command_line: str
    command: tuple[str, ...]


def plan_in(run_dir: Path) -> Plan:
    """The plan whose run folder this is."""
    manifest = msgspec.json.decode((run_dir / MANIFEST).read_bytes(), type=_FoundManifest)
    return Plan(manifest.job, (run_dir / "job.sh").read_text(), run_dir, manifest.command, manifest.command_line)


def queued_as(plan: Plan, scheduler: Scheduler) -> str | None:
    """The id of the job in the queue that runs this very script."""
    script = str(plan.run_dir / "job.sh")
    return next((r.job_id.split("_")[0] for r in scheduler.queue() if r.command == script), None)


def adopt_job(run_dir: Path, scheduler: Scheduler) -> Entry | None:
    """The job that was given this folder's script, recorded now if it was not; None: there is none.

    In order: what the submitter wrote, what the job wrote when it started, then the queue.
    """
    if (entry := read_json(run_dir / SUBMITTED, Entry)) is not None:
        return entry
    if not (run_dir / MANIFEST).exists():
        return None
    plan = plan_in(run_dir)
    taken = _started_as(plan)
    if taken is None and (job_id := queued_as(plan, scheduler)) is not None:
        taken = Submitted(job_id=job_id)
    return None if taken is None else remember(plan, taken).entry


def _started_as(plan: Plan) -> Submitted | None:
    """The job as it named itself when it started: ``123``, or ``123_4`` in an array task's folder.

    A bare number in a task's folder is the task's own id in Slurm's books and not the array's.
    """
    for path in (path for place in ("", "*/") for path in plan.run_dir.glob(f"{place}{STATE}")):
        state = read_json(path, StateFile)
        if state is None:
            continue
        parent, _, task = state.job_id.partition("_")
        if task or not plan.job.resources.array:
            return Submitted(job_id=parent, cluster=state.cluster or None)
    return None
