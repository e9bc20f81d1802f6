"""Reads a job's GPU usage from the samples of the trainers' monitor, since few sites' accounting samples GPUs.

A monitor samples each second and starts anew with each attempt, so its figures are of the last one. Energy is
the sum of power x time between samples, by NVML; the rest of the node stays modelled (``energy_source`` is ``nvml``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import polars as pl

from hpcjobs.files import read_regular
from hpcjobs.run.folder import output_dir
from hpcjobs.site.models import Site

_SCHEMA: Final = {
    "kind": pl.String,
    "time_s": pl.Float64,
    "gpu_percent": pl.Float64,
    "gpu_memory_bytes": pl.Float64,
    "gpu_power_w": pl.Float64,
}


class GpuUsage(NamedTuple):
    """The GPUs of a run. None: not known."""

    utilization: float | None
    """Mean over samples and nodes, 0 to 1."""
    mem_bytes: int | None
    """Peaks of the nodes together."""
    energy_j: float | None


def read_gpu_usage(folder: Path) -> GpuUsage | None:
    """What monitor.jsonl and monitor-N.jsonl of a run folder say; None where no GPU was watched."""
    nodes = [samples for path in sorted(folder.glob("monitor*.jsonl")) if len(samples := _samples(path))]
    if not nodes:
        return None
    busy = pl.concat([samples["gpu_percent"] for samples in nodes]).mean()
    memory = [peak for samples in nodes if isinstance(peak := samples["gpu_memory_bytes"].max(), float)]
    joules = [_joules(samples) for samples in nodes]
    return GpuUsage(
        utilization=busy / 100 if isinstance(busy, float) else None,
        mem_bytes=round(sum(memory)) if memory else None,
        energy_j=None if any(energy is None for energy in joules) else sum(energy or 0.0 for energy in joules),
    )


def add_gpu_usage(frame: pl.DataFrame, site: Site) -> pl.DataFrame:
    """GPU columns of jobs whose run folders hold a monitor's samples; with power, their energy too."""
    used = frame.filter((pl.col("gpus") > 0) & pl.col("run_dir").is_not_null())
    rows = [
        (job_id, run_dir, *seen)
        for job_id, run_dir in used.select("job_id", "run_dir").rows()
        if (seen := read_gpu_usage(output_dir(Path(run_dir), job_id))) is not None
    ]
    if not rows:
        return frame
    schema = {"job_id": pl.String, "run_dir": pl.String, "_use": pl.Float64, "_mem": pl.Int64, "_j": pl.Float64}
    usage = pl.DataFrame(rows, schema=schema, orient="row")
    modelled_gpus = pl.col("gpus") * (site.watts.gpu or 0.0) * pl.col("elapsed_s")
    rest = (pl.col("energy_j") - modelled_gpus).clip(0).fill_null(0)
    ours = pl.col("_j").is_not_null() & (pl.col("energy_source") != "measured").fill_null(True)
    ours &= pl.col("attempts") == 1
    return frame.join(usage, on=["job_id", "run_dir"], how="left", maintain_order="left").select(
        *(pl.col(name) for name in frame.columns if name not in _CHANGED),
        gpu_utilization=pl.coalesce("_use", "gpu_utilization"),
        gpu_mem_bytes=pl.coalesce("_mem", "gpu_mem_bytes"),
        gpu_source=pl.when(pl.col("_use").is_not_null()).then(pl.lit("monitor")).otherwise("gpu_source"),
        energy_j=pl.when(ours).then(pl.col("_j") + rest).otherwise("energy_j"),
        energy_source=pl.when(ours).then(pl.lit("nvml")).otherwise("energy_source"),
    ).select(frame.columns)  # fmt: skip


_CHANGED: Final = ("gpu_utilization", "gpu_mem_bytes", "gpu_source", "energy_j", "energy_source")


def _samples(path: Path) -> pl.DataFrame:
    """Samples that tell something of a GPU, in the order of time; the last line may be in the writing."""
    data = read_regular(path)
    lines = data[: data.rfind(b"\n") + 1]
    if not lines:
        return pl.DataFrame(schema=_SCHEMA)
    samples = pl.read_ndjson(lines, schema=_SCHEMA).filter(pl.col("kind") == "sample")
    return samples.filter(pl.any_horizontal(pl.col(name).is_not_null() for name in list(_SCHEMA)[2:]))


def _joules(samples: pl.DataFrame) -> float | None:
    """Power is that of the time since the sample before."""
    spent = samples.select((pl.col("gpu_power_w") * pl.col("time_s").diff().fill_null(pl.col("time_s"))).sum()).item()
    return float(spent) if samples["gpu_power_w"].null_count() < len(samples) else None
