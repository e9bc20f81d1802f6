"""Gathers everything known about one job for a reader."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpcjobs.record.attempts import Attempt
from hpcjobs.record.names import MANIFEST, SUMMARY
from hpcjobs.record.state import FirstFailure
from hpcjobs.run.attempts import read_attempts
from hpcjobs.run.folder import output_dir, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.progress import StepProgress, newest_step
from hpcjobs.run.samples import NodeSample, current_samples, newest_samples
from hpcjobs.run.state_file import own_ids, read_json, read_state
from hpcjobs.run.status import statuses
from hpcjobs.runtime.numbers import restore
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
    """summary.json, nested keys joined by dots; configuration, lists and what was not measured left out."""
    step: StepProgress | None
    """The newest line of metrics.jsonl, while the job runs."""
    monitor: list[NodeSample]
    """The newest sample of each node, while the job runs."""


def describe(entry: Entry) -> Description:
    """What the run folder and the scheduler know about ``entry``; a removed folder leaves blanks."""
    first_id = own_ids(entry)[0]
    manifest = _read(Path(entry.run_dir) / MANIFEST)
    job = manifest.get("job", {})
    state = read_state(entry, first_id)
    folder = output_dir(Path(entry.run_dir), first_id)
    summary = restore(_read(folder / SUMMARY))
    records = statuses([entry])[0].records
    running = any(not record.state.ended for record in records)
    cancelled = any(record.job_id == first_id and record.state is State.CANCELLED for record in records)
    return Description(
        entry=entry,
        records=records,
        attempts=read_attempts(task_dir(Path(entry.run_dir), first_id)),
        first_failure=state.first_failure if state and not cancelled else None,
        program=shlex.join(job.get("argv", [])) or next((r.command for r in records if r.command), ""),
        settings=_settings(job) if not entry.is_foreign else _scheduled_settings(records[0]),
        code=_code(manifest.get("code")),
        results=dict(flat({key: value for key, value in summary.items() if key != "config"})),
        step=newest_step(folder) if running else None,
        monitor=current_samples(newest_samples(folder), records[0]) if running else [],
    )


def _settings(job: dict[str, Any]) -> dict[str, tuple[str, str]]:
    resources, sources = job.get("resources", {}), job.get("sources", {})
    return {key: (str(value), sources.get(key, "default")) for key, value in resources.items() if value is not None}


def _scheduled_settings(record: JobRecord) -> dict[str, tuple[str, str]]:
    """What the scheduler says of a job that was submitted by other means."""
    time = None if record.time_limit_s is None else slurm_time(round(record.time_limit_s))
    values = {"partition": record.partition, "nodes": record.nnodes, "time": time}
    return {key: (str(value), record.source) for key, value in values.items() if value is not None}


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float]]:
    """The text and numbers of nested mappings, keys joined by dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any]) or {}


def _code(code: dict[str, Any] | None) -> str | None:
    if code is None:
        return None
    changed = ", changed since (code.patch)" if code["dirty"] else ""
    missing = f"; not kept: {code['missing']}" if code.get("missing") else ""
    return f"commit {code['commit']}{changed}{missing}"
