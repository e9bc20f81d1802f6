"""Finds the job of a run folder whose submitter may have been killed before it recorded that job."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from hpcjobs.errors import RequestError, SchedulerError, reason_of
from hpcjobs.files import read_regular
from hpcjobs.job.models import Job, Plan
from hpcjobs.record.names import MANIFEST, SUBMITTED
from hpcjobs.run import index, record
from hpcjobs.run.identity import is_cluster_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import read_json
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler.connect import connect

UNDECIDED_S = 600.0
"""How long a submission that was cut short, or that another host began, may still lead to a job: an sbatch outlives
the process that started it."""


class _FoundManifest(msgspec.Struct):
    """The parts of manifest.json that make the plan again."""

    job: Job
    command_line: str
    command: tuple[str, ...]


def plan_in(run_dir: Path) -> Plan:
    """The plan whose run folder this is.

    Raises:
        RequestError: its files cannot be used.
    """
    try:
        manifest = msgspec.json.decode(read_regular(run_dir / MANIFEST), type=_FoundManifest)
        script = read_regular(run_dir / "job.sh").decode()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"{run_dir} is no run folder that can be used: {reason_of(error)}") from error
    return Plan(manifest.job, script, run_dir, manifest.command, manifest.command_line)


def adopt_job(run_dir: Path, scheduler: Scheduler) -> Entry | None:
    """The job that was given this folder's script, recorded now if it was not; None: there is none.

    Raises:
        SchedulerError: it does not answer, so there may be one.
    """
    entry = read_json(run_dir / SUBMITTED, Entry)
    if entry is not None and os.path.realpath(entry.run_dir) == os.path.realpath(run_dir):
        if all((known.run_dir, known.job_id) != (entry.run_dir, entry.job_id) for known in index.entries()):
            with suppress(OSError):  # the next command tries again
                index.add(entry)
        record.forget(run_dir)
        return entry
    if not (run_dir / "job.sh").exists():  # it is written last: nothing was submitted yet
        return None
    taken = scheduler.find_submitted(plan := plan_in(run_dir))
    return record.remember(plan, taken[0], submitted=record.began_at(run_dir)) if taken else None


def read_index() -> index.Index:
    """The index, once it has the jobs whose submitters were killed before they recorded them."""
    begun = [each for each in record.read_begun() if not each.is_under_way]
    for each in begun:
        with suppress(SchedulerError, RequestError):  # it is not known yet: the next command asks again
            _adopt(each)
    return index.read()


def _adopt(begun: record.Begun) -> None:
    """Record the job of a submission that was cut short; forget one that surely led to no job."""
    run_dir = Path(begun.run_dir)
    if not run_dir.parent.is_dir() or not is_cluster_reachable(begun.scheduler, begun.slurm_conf, begun.cluster):
        return
    entry = adopt_job(run_dir, connect(begun.scheduler, begun.slurm_conf)) if run_dir.is_dir() else None
    if entry is None and time.time() - begun.when > UNDECIDED_S:
        record.forget(run_dir)
