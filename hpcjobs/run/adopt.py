"""The job of a run folder whose submitter may have been killed before it wrote down that there is one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcjobs.job.models import Job, Plan
from hpcjobs.run.folder import MANIFEST, STATE, SUBMITTED
from hpcjobs.run.index import Entry
from hpcjobs.run.submit import remember
from hpcjobs.scheduler.base import Scheduler, Submitted


class _Manifest(msgspec.Struct):
    """The parts of manifest.json that make the plan again."""

    job: Job
    command_line: str
    command: tuple[str, ...]


class _Owner(msgspec.Struct):
    """The part of state.json that says whose it is: ``123``, or ``123_4`` in an array task's folder."""

    job_id: str


def plan_in(run_dir: Path) -> Plan:
    """The plan whose run folder this is."""
    kept = msgspec.json.decode((run_dir / MANIFEST).read_bytes(), type=_Manifest)
    return Plan(kept.job, (run_dir / "job.sh").read_text(), run_dir, kept.command, kept.command_line)


def queued_as(plan: Plan, scheduler: Scheduler) -> str | None:
    """The id of the job in the queue that runs this very script."""
    script = str(plan.run_dir / "job.sh")
    return next((r.job_id.split("_")[0] for r in scheduler.queue() if r.command == script), None)


def adopted(run_dir: Path, scheduler: Scheduler) -> Entry | None:
    """The job that was given this folder's script, recorded now if it was not; None: there is none.

    Asked are what the submitter wrote, what the job wrote when it started, then the queue.
    """
    if (run_dir / SUBMITTED).exists():
        return msgspec.json.decode((run_dir / SUBMITTED).read_bytes(), type=Entry)
    if not (run_dir / MANIFEST).exists():
        return None
    plan = plan_in(run_dir)
    job_id = _own_id(run_dir) or queued_as(plan, scheduler)
    return None if job_id is None else remember(plan, Submitted(job_id=job_id)).entry


def _own_id(run_dir: Path) -> str | None:
    written = next((path for place in ("", "*/") for path in run_dir.glob(f"{place}{STATE}")), None)
    if written is None:
        return None
    return msgspec.json.decode(written.read_bytes(), type=_Owner).job_id.split("_")[0]
