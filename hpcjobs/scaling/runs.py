"""The runs of a study as a table, from their run folders and the accounting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from hpcjobs.jobstats.columns import JobFilter
from hpcjobs.jobstats.sources import gather
from hpcjobs.record import SUMMARY
from hpcjobs.record.figures import LINE_CHARACTERS, find_rate
from hpcjobs.record.summary import Quantiles
from hpcjobs.run.job_files import (
    counts_as_measurement,
    explain_missing_rate,
    has_reader,
    last_lines,
    read_json,
    read_rate,
)
from hpcjobs.scaling.study import Mode, Study, StudyRun
from hpcjobs.scaling.study_sweep import list_runs, read_code, read_image
from hpcjobs.site.figures import parse_metric
from hpcjobs.units import task_ids

MIXABLE: Final = {
    "code": "code versions",
    "image": "container images",
    "node_model": "node models",
    "torch_version": "versions of torch",
}
"""Columns that must not differ within a study, and their names."""

WHOLE_JOBS: Final = ("runs/h", "rank-runs/h")
"""Units of programs that leave no summary.json: of a strong and of a weak study."""

_COLUMNS: Final[dict[str, Any]] = {
    "nodes": pl.Int64, "ranks": pl.Int64, "ntasks_per_node": pl.Int64, "repeat": pl.Int64, "job_id": pl.String,
    "state": pl.String, "throughput": pl.Float64, "unit": pl.String, "elapsed_s": pl.Float64, "step_s": pl.Float64,
    "communication_s": pl.Float64, "data_wait_s": pl.Float64, "checkpoint_share": pl.Float64, "samples": pl.Int64,
    "epoch_s": pl.Float64, "mfu": pl.Float64, "loss": pl.Float64, "cpu_efficiency": pl.Float64,
    "gpu_utilization": pl.Float64, "queue_wait_s": pl.Int64, "energy_j": pl.Float64, "energy_source": pl.String,
    "cost": pl.Float64, "currency": pl.String, "node_list": pl.String, "source": pl.String, "code": pl.String,
    "image": pl.String, "node_model": pl.String, "torch_version": pl.String, "run_dir": pl.String,
    "partition": pl.String, "ended": pl.Int64,
    "series": pl.String, "log": pl.String, "problem": pl.String,
}  # fmt: skip
_FROM_ACCOUNTING = (
    *("state", "cpu_efficiency", "gpu_utilization", "queue_wait_s", "energy_j", "energy_source", "cost", "currency"),
    *("node_list", "source", "partition", "ended"),
)


class Measurements(msgspec.Struct):
    """Keys of summary.json that a study reads. Any program may write them; hpcjobs.record.summary explains them."""

    elapsed_s: float | None = None
    step_time_s: Quantiles | None = None
    exposed_communication_s: Quantiles | None = None
    data_wait_s: Quantiles | None = None
    checkpoint_stall_s: Quantiles | None = None
    steps: int | None = None
    epochs: float | None = None
    samples: int | None = None
    mfu: float | None = None
    loss: float | None = None
    device_name: str | None = None
    torch_version: str | None = None


def read_runs(study: Study) -> pl.DataFrame:
    """One row per run that was submitted, also of runs that have not ended.

    Raises SchedulerError: neither the accounting nor the queue answers.
    """
    figure = next(iter(parse_metric(study.metric[0]))) if study.metric else None
    return tabulate(list_runs(study), site=study.site, mode=study.mode, figure=figure)


def tabulate(runs: Iterable[StudyRun], *, site: str, mode: Mode, figure: str | None = None) -> pl.DataFrame:
    """The table of these runs.

    A program that leaves no summary.json is measured by the time its job took: in ``runs/h``, or, as a run of a weak
    study does work in proportion to its ranks, in ``rank-runs/h`` (ranks x runs/h). A requeued job gives no figure: its
    last attempt may have continued the work of earlier ones. Nor does a run that failed.

    Args:
        figure: the only figure that counts; None: the first one that was read, or the program's own throughput.

    Raises SchedulerError: neither the accounting nor the queue answers.
    """
    known = [(run, run.job_id) for run in runs if run.job_id is not None]
    if not known:
        return pl.DataFrame(schema=_COLUMNS)
    ids = tuple(dict.fromkeys(job_id.partition("_")[0] for _, job_id in known))
    jobs = gather(JobFilter(since=0, job_ids=ids), site=site).jobs
    by_id = {task: row for row in jobs.to_dicts() for task in task_ids(row["job_id"])}
    rows = [_row(run, by_id.get(job_id, {}), mode=mode, figure=figure) for run, job_id in known]
    return pl.DataFrame(rows, schema=_COLUMNS, orient="row").sort("ranks", "nodes", "repeat", maintain_order=True)


def _row(run: StudyRun, job: dict[str, Any], *, mode: Mode, figure: str | None) -> dict[str, Any]:
    folder = Path(run.run_dir)
    row: dict[str, Any] = dict.fromkeys(_COLUMNS)
    row.update({name: job.get(name) for name in _FROM_ACCOUNTING})
    row.update(
        nodes=run.size.nodes,
        ntasks_per_node=run.size.ntasks_per_node,
        ranks=run.size.ranks,
        repeat=run.repeat,
        job_id=run.job_id,
        run_dir=run.run_dir,
        series=run.series,
        elapsed_s=None if job.get("elapsed_s") is None else float(job["elapsed_s"]),
    )
    if run.job_dir is not None:
        job_dir = Path(run.job_dir)
        log = next(map(str, job_dir.glob(f"logs/*_{run.job_id}.out")), None)
        row.update(code=read_code(job_dir), image=read_image(job_dir), log=log)
    if has_summary := (folder / SUMMARY).exists():
        summary = read_json(folder / SUMMARY, Measurements)
        row.update({} if summary is None else _take_measurements(summary))
    state = job.get("state")
    if not counts_as_measurement(state):
        return row
    if has_summary or has_reader(folder) or (figure is not None and state in ("COMPLETED", "TIMEOUT")):
        if (rate := read_rate(folder, figure)) is not None:
            row.update(throughput=rate.value, unit=rate.label)
        else:
            row.update(problem=explain_missing_rate(folder, figure))
    elif (job.get("attempts") or 1) > 1:
        row.update(problem="requeued, and its last attempt may have done a part of the work only")
    elif state == "COMPLETED" and job.get("elapsed_s"):
        work, unit = (run.size.ranks, WHOLE_JOBS[1]) if mode == "weak" else (1, WHOLE_JOBS[0])
        row.update(throughput=work * 3600 / job["elapsed_s"], unit=unit)
    return row


def rounding_variance(run: Mapping[str, Any]) -> float:
    """The variance of the logarithm of a run's throughput that its time in whole seconds makes; 0 of other figures.

    Slurm cuts the start and the end of a job to whole seconds. Each of the two errors is uniform over one second, with
    the variance 1/12 s^2, so the time between has the variance 1/6 s^2. The time of a local job is rounded once:
    1/12 s^2. As d log(1/T) = -dT / T, the variance of the logarithm is 1 / (6 T^2) or 1 / (12 T^2). Runs that start in
    the same moment, or take the same time, have the same error: repeats do not make it smaller.
    """
    if run["unit"] not in WHOLE_JOBS or not run["elapsed_s"]:
        return 0.0
    return 1 / ((12 if run["source"] == "local" else 6) * float(run["elapsed_s"]) ** 2)


def suggest_metric(runs: pl.DataFrame) -> str | None:
    """The ``--metric`` that would read a rate, if the log of a run prints one; None: none is seen there."""
    logs = (last_lines(Path(log)) for log in runs["log"].drop_nulls().to_list()[:1])
    lines = [line[:LINE_CHARACTERS].decode("utf-8", "replace") for block in logs for line in block]
    return next((metric for line in reversed(lines) if (metric := find_rate(line)) is not None), None)


def _take_measurements(summary: Measurements) -> dict[str, Any]:
    stalled_s, stepped_s = _sum(summary.checkpoint_stall_s), _sum(summary.step_time_s)
    measured = 0 if summary.step_time_s is None else summary.step_time_s.count
    per_epoch = summary.steps / summary.epochs if summary.steps and summary.epochs else None
    return {
        "elapsed_s": summary.elapsed_s,
        "step_s": _median(summary.step_time_s),
        "communication_s": _median(summary.exposed_communication_s),
        "data_wait_s": _median(summary.data_wait_s),
        "checkpoint_share": stalled_s / stepped_s if stalled_s is not None and stepped_s else None,
        "samples": summary.samples,
        "epoch_s": stepped_s / measured * per_epoch if stepped_s and measured and per_epoch else None,
        "mfu": summary.mfu,
        "loss": summary.loss,
        "node_model": summary.device_name,
        "torch_version": summary.torch_version,
    }


def _sum(value: Quantiles | None) -> float | None:
    """Over all steps; of a version that did not record it, the median times their number."""
    if value is None:
        return None
    return value.median * value.count if value.total is None else value.total


def _median(value: Quantiles | None) -> float | None:
    return None if value is None else value.median


def find_mixtures(runs: pl.DataFrame) -> list[str]:
    """Find columns of `MIXABLE` that differ between runs: one sentence each."""
    return [
        f"{what}: {', '.join(sorted(values))}"
        for column, what in MIXABLE.items()
        if len(values := set(runs[column].drop_nulls())) > 1
    ]
