"""A submitted job in Python, and all that is known about one job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from hpcjobs.record.attempts import Attempt
from hpcjobs.record.manifest import Manifest, RecordedCode, RequestedJob, read_manifest
from hpcjobs.record.metrics import read_lines
from hpcjobs.record.names import MANIFEST, METRICS, SUMMARY
from hpcjobs.record.numbers import decode_object
from hpcjobs.record.state import FirstFailure
from hpcjobs.record.summary import flatten, read_summary
from hpcjobs.run import logs, status, wait
from hpcjobs.run.control import cancel
from hpcjobs.run.folder import output_dir, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import own_ids, read_attempts, read_state, read_usable
from hpcjobs.run.progress import NodeSample, StepProgress, current_samples, newest_samples, newest_step
from hpcjobs.run.select import select
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


class JobHandle:
    """One job, or one array: ``hpcjobs.submit`` returns it, ``hpcjobs.find(id)`` finds it again."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, site={self.entry.site!r}, run_dir={self.entry.run_dir!r})"

    @property
    def id(self) -> str:
        """The scheduler's id."""
        return self.entry.job_id

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.entry.run_dir)

    @property
    def records(self) -> list[JobRecord]:
        """The current state: one record, or one per array task."""
        return status.statuses([self.entry])[0].records

    @property
    def state(self) -> State:
        """The state now; of an array, the first state that is not COMPLETED."""
        states = [record.state for record in self.records]
        return next((state for state in states if state is not State.COMPLETED), states[0])

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the job has ended; its exit code.

        Raises:
            TimeoutError: ``timeout_s`` seconds have passed.
        """
        return wait.exit_code(wait.wait([self.entry], timeout_s=timeout_s))

    @property
    def attempts(self) -> list[Attempt]:
        """Each start of a job with ``retries``: its end, cause and decision; oldest first."""
        return read_attempts(self.run_dir)

    def cancel(self) -> None:
        """End the job; no error if it has ended."""
        cancel([self.entry])

    def logs(self, *, rank: int | None = None) -> str:
        """The output of the job until now, or the output of one rank."""
        return "".join(logs.lines(self.entry, rank=rank))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; empty when the program writes none."""
        path = self.run_dir / METRICS
        return list(filter(None, map(decode_object, read_lines(path)))) if path.exists() else []

    def summary(self) -> dict[str, Any] | None:
        """summary.json; None when the program has not written one, or, with a warning, none that can be used."""
        path = self.run_dir / SUMMARY
        return read_usable(path, lambda: read_summary(path))


def find(name: str | int | Path, *, site: str | None = None) -> JobHandle:
    """The job that ``name`` stands for: an id, an array task, a run folder, or a name (the newest of that name).

    Raises:
        UnknownJobError: no job has this name. RequestError: two sites have given out this id.
    """
    return JobHandle(select([str(name)], site=site)[0])
