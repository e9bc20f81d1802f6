"""Finds earlier runs of the same program and class of arguments, with the figure that each has measured.

Only the user's list of jobs and run folders are read; no scheduler is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.record import METRICS
from hpcjobs.record.metrics import decode_step
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    Rate,
    counts_as_measurement,
    last_lines,
    output_dir,
    own_ids,
    own_record,
    read_ends,
    read_job_manifest,
    read_rate,
    requested_figure,
)
from hpcjobs.run.progress import read_progress
from hpcjobs.run.select import entries_of
from hpcjobs.scaling.study_sweep import read_code
from hpcjobs.scheduler.base import JobRecord, State

TRIAL: Final = "-trial"
"""End of the name of a job that measures a size."""
_MOST_ENTRIES: Final = 2000
_ALIKE = ("partition", "constraint", "exclusive", "threads_per_core", "hint", "reservation")
"""Resources that runs of one class have in common, in addition to the shape of the job."""
_LENGTH = re.compile(
    r"--?(?:(?:num[-_]train[-_])?epochs|(?:max[-_])?steps|max[-_]iters|iterations|seed|resume"
    r"|output(?:[-_]dir)?|run[-_]name)(=.*)?",
    re.DOTALL,
)
"""Options that change how long a run takes and where it writes, not how fast it is."""


class EarlierRun(NamedTuple):
    """An earlier run and its measured throughput."""

    entry: Entry
    job_id: str
    job: Job
    folder: Path
    """Folder that its program wrote to."""
    state: State | None
    """None: it has not begun to write."""
    elapsed_s: float
    throughput: float | None
    unit: str | None
    duration_s: float | None
    """Seconds of a complete run, measured or estimated from its steps; None: not known."""

    @property
    def is_trial(self) -> bool:
        return self.entry.name.endswith(TRIAL)

    @property
    def ended(self) -> bool:
        return self.state is not None and (self.state.ended or self.state is State.UNKNOWN)

    @property
    def node_s(self) -> float:
        """Its cost."""
        return self.job.nodes * self.elapsed_s


def class_of(job: Job, *, without: str) -> tuple[object, ...]:
    """The properties that comparable runs share, except the option ``without``, which is to be chosen."""
    shape: dict[str, Any] = {
        "nodes": (job.nodes, job.max_nodes),
        "ntasks_per_node": (job.ntasks_per_node, job.gpus_per_node),
        "cpus_per_task": job.resources.cpus_per_task or 1,
        "launcher": job.launcher,
    }
    del shape[without]
    image = None if job.container is None else (job.container.name, job.container.fingerprint)
    env = {name: value for name, value in job.env.items() if not name.startswith("HPCJOBS_")}
    alike = [job.gpu_model, *(getattr(job.resources, name) for name in _ALIKE)]
    return job.site, _speed_arguments(job.argv), job.chdir, image, env, job.figures, alike, shape


def _speed_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments, without options that only change how long the run takes (`_LENGTH`)."""
    left: list[str] = []
    arguments = iter(enumerate(argv))
    for position, argument in arguments:
        match = _LENGTH.fullmatch(argument)
        if match is None:
            left.append(argument)
        elif match[1] is None and not "".join(argv[position + 1 : position + 2]).startswith("-"):
            next(arguments, None)
    return left


def find_runs(
    like: Job, *, axis: str, code: str | None, records: Mapping[str, JobRecord] | None = None
) -> list[EarlierRun]:
    """The user's runs that differ from ``like`` in ``axis`` alone and were of the same code, oldest first.

    ``records``: new records of the scheduler, by run folder; for other jobs the run folder is read.
    """
    group = class_of(like, without=axis)
    runs: list[EarlierRun] = []
    for entry in [one for one in entries_of(None) if one.site == like.site][-_MOST_ENTRIES:]:
        if entry.is_foreign or _edited_since(like, entry.submitted):
            continue
        job = _read_job(Path(entry.run_dir))
        if job is None or class_of(job, without=axis) != group:
            continue
        if read_code(Path(entry.run_dir)) == code:
            known = (records or {}).get(entry.run_dir)
            ends = {record.job_id: record for record in read_ends(entry)}
            runs += (_read_run(entry, job_id, job, known or ends.get(job_id)) for job_id in own_ids(entry))
    return runs


@cache
def _read_job(run_dir: Path) -> Job | None:
    """The job of a run folder; None where it cannot be compared: cells of a sweep have parameters of their own."""
    try:
        manifest = read_job_manifest(run_dir)
    except RequestError:  # removed, or of a hpcjobs with other fields
        return None
    is_cell = manifest.job.template == "sweep" and not (manifest.command_line or "").startswith("hpcjobs scale")
    return None if is_cell else manifest.job


def _edited_since(job: Job, submitted: float) -> bool:
    """Whether a file among the arguments changed after ``submitted``; outside a repository no other sign exists."""
    paths = (os.path.join(job.chdir, argument) for argument in job.argv[:3] if len(argument) < 1000)
    return any(os.path.isfile(path) and os.stat(path).st_mtime > submitted + 1 for path in paths)


def _read_run(entry: Entry, job_id: str, job: Job, record: JobRecord | None) -> EarlierRun:
    record = record or own_record(entry, job_id)
    state = None if record is None else record.state
    elapsed_s = (record.elapsed_s if record is not None else None) or 0.0
    folder = output_dir(Path(entry.run_dir), job_id)
    figure = None
    if state is not None and counts_as_measurement(state):
        requested = requested_figure(job)
        figure = read_rate(folder, requested) or (_rate_so_far(folder) if requested is None else None)
    duration_s = elapsed_s if state is State.COMPLETED else _duration(folder) if figure else None
    value, unit = (None, None) if figure is None else (figure.value, figure.label)
    return EarlierRun(entry, job_id, job, folder, state, elapsed_s, value, unit, duration_s)


def _rate_so_far(folder: Path) -> Rate | None:
    """The median of the last lines, of a program that was ended before it wrote its summary."""
    lines = map(decode_step, last_lines(folder / METRICS))
    measured = [(step.throughput, step.unit) for step in lines if step is not None and step.throughput]
    return Rate("throughput", median(value for value, _ in measured), measured[-1][1] or "") if measured else None


def _duration(folder: Path) -> float | None:
    progress = read_progress(folder)
    if progress is None or not progress.total_steps or not progress.steps_per_s:
        return None
    return progress.total_steps / progress.steps_per_s
