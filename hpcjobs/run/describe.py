"""Gathers everything known about one job for a reader."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from hpcjobs.record.attempts import Attempt
from hpcjobs.record.manifest import Manifest, RecordedCode, RequestedJob, read_manifest
from hpcjobs.record.names import MANIFEST, SUMMARY
from hpcjobs.record.state import FirstFailure
from hpcjobs.record.summary import flatten, read_summary
from hpcjobs.run.folder import output_dir, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import own_ids, read_attempts, read_state, read_usable
from hpcjobs.run.progress import NodeSample, StepProgress, current_samples, newest_samples, newest_step
from hpcjobs.run.status import statuses
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.units import slurm_time


class Description(NamedTuple):
    """Everything known about one job."""

    entry: Entry
    records: list[JobRecord]
    attempts: list[Attempt]
    first_failure: FirstFailure | None
    program: str
    settings: dict[str, tuple[str, str]]
    """Resource -> value, and where it was read."""
    code: str | None
    results: dict[str, str | int | float]
    """summary.json without configuration, lists and nulls; nested keys are joined by dots."""
    step: StepProgress | None
    """The newest line of metrics.jsonl, while the job runs."""
    monitor: list[NodeSample]
    """The newest sample of each node, while the job runs."""


def describe(entry: Entry) -> Description:
    """Describe a job by its run folder and its scheduler; a removed folder leaves blanks."""
    first_id = own_ids(entry)[0]
    run_dir = Path(entry.run_dir)
    manifest = read_usable(run_dir / MANIFEST, lambda: read_manifest(run_dir)) or Manifest(job={})
    job = manifest.request
    state = read_state(entry, first_id)
    folder = output_dir(Path(entry.run_dir), first_id)
    summary = read_usable(folder / SUMMARY, lambda: read_summary(folder / SUMMARY)) or {}
    records = statuses([entry])[0].records
    running = any(not record.state.ended for record in records)
    cancelled = any(record.job_id == first_id and record.state is State.CANCELLED for record in records)
    return Description(
        entry=entry,
        records=records,
        attempts=read_attempts(task_dir(Path(entry.run_dir), first_id)),
        first_failure=state.first_failure if state and not cancelled else None,
        program=shlex.join(job.argv) or next((r.command for r in records if r.command), ""),
        settings=_settings(job) if not entry.is_foreign else _scheduled_settings(records[0]),
        code=_describe_code(manifest.code),
        results=dict(flatten({key: value for key, value in summary.items() if key != "config"})),
        step=newest_step(folder) if running else None,
        monitor=current_samples(newest_samples(folder), records[0]) if running else [],
    )


def _settings(job: RequestedJob) -> dict[str, tuple[str, str]]:
    given = {key: value for key, value in job.resources.items() if value is not None}
    return {key: (str(value), job.sources.get(key, "default")) for key, value in given.items()}


def _scheduled_settings(record: JobRecord) -> dict[str, tuple[str, str]]:
    """Settings of a job submitted by other means, from the scheduler."""
    time = None if record.time_limit_s is None else slurm_time(round(record.time_limit_s))
    values = {"partition": record.partition, "nodes": record.nnodes, "time": time}
    return {key: (str(value), record.source) for key, value in values.items() if value is not None}


def _describe_code(code: RecordedCode | None) -> str | None:
    if code is None:
        return None
    changed = ", changed since (code.patch)" if code.dirty else ""
    return f"commit {code.commit}{changed}" + (f"; not kept: {code.missing}" if code.missing else "")
