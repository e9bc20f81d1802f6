"""Usage that sacct lacks, and advice about the next submission.

Of running jobs sstat has the usage, and the files of the run folder have goodput and the load of GPUs.

Goodput: a resumed run cuts metrics.jsonl at its checkpoint and opens a new part with a ``run`` line. So the last
``time_s`` of each part is the time that was kept. Parts start with the training, so the start-up of earlier attempts
counts as lost.

GPUs: a monitor samples each second and starts again with each attempt, so its figures are of the last one. Energy is
the sum of power x time between samples, by NVML; the rest of the node stays modelled (``energy_source`` is ``nvml``).

Margins of the advice: memory a third above the fullest node seen (at least 256 MB), rounded up to a step people write;
time 1.5 x the run time. For a run that did not complete, the only advice is more of the resource that ran out. Runs of
less than a minute give no advice: their peaks were not sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import polars as pl

from hpcjobs.errors import CommandMissingError
from hpcjobs.files import read_regular
from hpcjobs.jobstats.derive import known_sum
from hpcjobs.processes.programs import Runner, run
from hpcjobs.record import METRICS
from hpcjobs.record.metrics import read_lines
from hpcjobs.record.monitor import IMPOSSIBLE, decode_sample
from hpcjobs.record.values import decode_object
from hpcjobs.run.job_files import output_dir
from hpcjobs.scheduler.slurm.parse import Table, read_bytes, read_clock_s, read_resource
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import cluster_env, list_steps
from hpcjobs.units import human_bytes, slurm_time

_MOST_JOBS: Final = 16
"""sstat asks every node of every step: for a long list of jobs it would take long and load their nodes."""
_STEPS: Final = Table(("JobID", "MaxRSS", "TRESUsageInTot"), "|")


def add_running_usage(frame: pl.DataFrame, *, slurm_conf: str | None, runner: Runner = run) -> pl.DataFrame:
    """Add the usage of running jobs, if they are few and sstat answers; otherwise it stays unknown."""
    running = frame.filter(pl.col("state") == "RUNNING")["job_id_raw"].to_list()
    if not 0 < len(running) <= _MOST_JOBS:
        return frame
    # The exit code is useless: other people's jobs are refused one by one, and the rest is printed.
    try:
        answer = runner(list_steps(*_STEPS, running), env=cluster_env(slurm_conf))
    except CommandMissingError:  # some sites give their users sacct alone: the use of running jobs stays unknown
        return frame
    seen = parse_sstat(answer.out)
    live = pl.col("state") == "RUNNING"
    return (
        frame.join(seen, on="job_id_raw", how="left", maintain_order="left")
        .with_columns(
            cpu_s=pl.when(live & pl.col("_cpu").is_not_null())
            .then(pl.col("_cpu") + pl.col("_ended_steps_cpu_s").fill_null(0.0))
            .otherwise("cpu_s"),
            mem_used_bytes=_largest(live, "_mem", "_ended_steps_mem_bytes", "mem_used_bytes"),
            max_rss_bytes=_largest(live, "_rss", "_ended_steps_rss_bytes", "max_rss_bytes"),
        )
        .select(frame.columns)
    )


def _largest(live: pl.Expr, now: str, ended: str, column: str) -> pl.Expr:
    """Of a running job the larger value of running and of ended steps if it is known, otherwise ``column``."""
    return pl.when(live & pl.col(now).is_not_null()).then(pl.max_horizontal(now, ended)).otherwise(column)


def parse_sstat(out: str) -> pl.DataFrame:
    """Usage of each running job until now, from the table `_STEPS`, without Slurm's extern step. Null: not measured."""
    rows = []
    for row in _STEPS.rows(out):
        (job_id, _, step), sampled = row.raw("JobID").partition("."), row.raw("TRESUsageInTot")
        if step != "extern":
            cpu_s, mem_bytes = read_clock_s(read_resource(sampled, "cpu")), read_bytes(read_resource(sampled, "mem"))
            rows.append((job_id, cpu_s, mem_bytes, read_bytes(row.raw("MaxRSS"))))
    schema = {"job_id_raw": pl.String, "_cpu": pl.Float64, "_mem": pl.Int64, "_rss": pl.Int64}
    steps = pl.DataFrame(rows, schema=schema, orient="row")
    sums = (known_sum(pl.col(name)) for name in ("_cpu", "_mem"))  # of the tasks' peaks, all steps together
    return steps.group_by("job_id_raw").agg(*sums, pl.col("_rss").max())


def read_lasting_s(run_dir: Path) -> list[float] | None:
    """Seconds that lasted, of each part of the metrics; None where there are none."""
    path = run_dir / METRICS
    if not path.exists():
        return None
    parts: list[float] = []
    for entry in filter(None, map(decode_object, read_lines(path))):
        time_s = entry.get("time_s")
        if entry.get("kind") == "run":
            parts.append(0.0)
        elif parts and isinstance(time_s, int | float) and 0 <= time_s < IMPOSSIBLE:
            parts[-1] = float(time_s)
    return parts or None


def add_goodput(frame: pl.DataFrame) -> pl.DataFrame:
    """Lost seconds of requeued jobs by their metrics, where a run folder has some."""
    requeued = frame.filter((pl.col("attempts") > 1) & pl.col("run_dir").is_not_null())
    lost_s_of = {}
    for job_id, run_dir, lost in requeued.select("job_id", "run_dir", "lost_s").rows():
        parts = read_lasting_s(output_dir(Path(run_dir), job_id))
        if parts is not None:
            lost_s_of[job_id] = max(0.0, lost - sum(parts[:-1]))
    if not lost_s_of:
        return frame
    known = pl.col("job_id").is_in(list(lost_s_of))
    lost = pl.col("job_id").replace_strict(lost_s_of, default=None, return_dtype=pl.Float64)
    return frame.with_columns(
        lost_s=pl.when(known).then(lost).otherwise("lost_s"),
        goodput=pl.when(known).then(1 - lost / pl.col("elapsed_all_s")).otherwise("goodput"),
        goodput_source=pl.when(known).then(pl.lit("checkpoints")).otherwise("goodput_source"),
    )


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
    nodes: int
    """Nodes with samples."""
    metered_s: float
    """Seconds for which the power is known, of the node with the fewest."""


def read_gpu_usage(folder: Path) -> GpuUsage | None:
    """Read monitor.jsonl and monitor-N.jsonl of a run folder; None if no GPU was sampled."""
    nodes = [samples for path in sorted(folder.glob("monitor*.jsonl")) if len(samples := _samples(path))]
    if not nodes:
        return None
    busy = pl.concat([samples["gpu_percent"] for samples in nodes]).mean()
    memory = _sum_all(samples["gpu_memory_bytes"].max() for samples in nodes)
    metered_s = _PASSED_S.filter(pl.col("gpu_power_w").is_not_null()).sum()
    return GpuUsage(
        utilization=busy / 100 if isinstance(busy, float) else None,
        mem_bytes=None if memory is None else round(memory),
        energy_j=_sum_all(map(_joules, nodes)),
        nodes=len(nodes),
        metered_s=min(float(samples.select(metered_s).item()) for samples in nodes),
    )


def _sum_all(parts: Iterable[object]) -> float | None:
    """The sum of ``parts``; None: one of them is not known."""
    known = [part if isinstance(part, float) else None for part in parts]
    return None if None in known else math.fsum(filter(None, known))


def add_gpu_usage(frame: pl.DataFrame, site: Site) -> pl.DataFrame:
    """Set the GPU columns of jobs with samples of a monitor; with power, their energy too."""
    used = frame.filter((pl.col("gpus") > 0) & pl.col("run_dir").is_not_null())
    rows = [
        (job_id, run_dir, *seen)
        for job_id, run_dir in used.select("job_id", "run_dir").rows()
        if (seen := read_gpu_usage(output_dir(Path(run_dir), job_id))) is not None
    ]
    if not rows:
        return frame
    used_columns = {"_use": pl.Float64, "_mem": pl.Int64, "_j": pl.Float64, "_nodes": pl.Int64, "_s": pl.Float64}
    schema = {"job_id": pl.String, "run_dir": pl.String, **used_columns}
    usage = pl.DataFrame(rows, schema=schema, orient="row")
    modelled_gpus = pl.col("gpus") * (site.watts.gpu or 0.0) * pl.col("elapsed_s")
    rest = (pl.col("energy_j") - modelled_gpus).clip(0).fill_null(0)
    ours = pl.col("_j").is_not_null() & (pl.col("energy_source") != "measured").fill_null(True)
    # Energy and memory are sums: without one node, or for energy without the last hours, they are too small.
    every_node = pl.col("_nodes") == pl.col("nodes")
    ours &= every_node & (pl.col("_s") >= _SAMPLED * pl.col("elapsed_s"))
    ours &= pl.col("attempts") == 1
    return frame.join(usage, on=["job_id", "run_dir"], how="left", maintain_order="left").select(
        *(pl.col(name) for name in frame.columns if name not in _CHANGED),
        gpu_utilization=pl.coalesce("_use", "gpu_utilization"),
        gpu_mem_bytes=pl.coalesce(pl.when(every_node).then("_mem"), "gpu_mem_bytes"),
        gpu_source=pl.when(pl.col("_use").is_not_null()).then(pl.lit("monitor")).otherwise("gpu_source"),
        energy_j=pl.when(ours).then(pl.col("_j") + rest).otherwise("energy_j"),
        energy_source=pl.when(ours).then(pl.lit("nvml")).otherwise("energy_source"),
    ).select(frame.columns)  # fmt: skip


_SAMPLED: Final = 0.9
"""Share of the run time: a program needs some of it until its monitor starts."""
_CHANGED: Final = ("gpu_utilization", "gpu_mem_bytes", "gpu_source", "energy_j", "energy_source")


def _samples(path: Path) -> pl.DataFrame:
    """Samples that tell something of a GPU, in the order of time; the last line may be in the writing."""
    data = read_regular(path)
    lines = data[: data.rfind(b"\n") + 1]
    if not lines:
        return pl.DataFrame(schema=_SCHEMA)
    try:
        samples = pl.read_ndjson(lines, schema=_SCHEMA)
    except pl.exceptions.ComputeError:  # damaged lines: each is read alone, which takes ten times as long
        read = (sample for line in lines.splitlines() if (sample := decode_sample(line)) is not None)
        rows = [("sample", *(getattr(sample, name) for name in list(_SCHEMA)[1:])) for sample in read]
        samples = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    samples = samples.filter(
        pl.col("kind") == "sample", *((pl.col(name).abs() < IMPOSSIBLE).fill_null(True) for name in list(_SCHEMA)[1:])
    )
    return samples.filter(pl.any_horizontal(pl.col(name).is_not_null() for name in list(_SCHEMA)[2:]))


_PASSED_S: Final = pl.col("time_s").diff().fill_null(pl.col("time_s"))
"""Power holds for the time since the sample before."""


def _joules(samples: pl.DataFrame) -> float | None:
    spent = samples.select((pl.col("gpu_power_w") * _PASSED_S).sum()).item()
    return float(spent) if samples["gpu_power_w"].null_count() < len(samples) else None


_MEM_MARGIN, _TIME_MARGIN = 4 / 3, 1.5
_SHORTEST_S = 60
_GB = 1 << 30


class Advice(NamedTuple):
    """One thing to change: the option, its value, and why in one sentence."""

    option: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.why}: {self.option}={self.value}"


class JobUsage(NamedTuple):
    """Request and usage of one job. Names are columns of the accounting; None: not known."""

    state: str
    nodes: int | None
    cpus: int | None
    tasks: int | None
    gpus: int
    needed_s: float | None
    """Time of all attempts without lost time: the next job starts without a checkpoint."""
    time_limit_s: int | None
    mem_requested_bytes: int | None
    mem_per_node_bytes: int | None
    cpu_efficiency: float | None
    gpu_utilization: float | None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> JobUsage:
        """The values of a row of the accounting's table, by column."""
        lost_s = row["lost_s"] if row["goodput_source"] == "checkpoints" else 0
        needed_s = None if row["elapsed_all_s"] is None else row["elapsed_all_s"] - lost_s
        values = {name: row[name] for name in cls._fields if name != "needed_s"}
        return cls(**values, needed_s=needed_s)

    @property
    def is_typical(self) -> bool:
        """Whether it completed, and took long enough."""
        return self.state == "COMPLETED" and (self.needed_s or 0) >= _SHORTEST_S


def advise(job: JobUsage) -> list[Advice]:
    """Advice for one job; empty if no change would help."""
    every = [_memory(job), _time(job), _cpus(job), _gpus(job)]
    return [advice for advice in every if advice is not None]


def _memory(job: JobUsage) -> Advice | None:
    requested, used, nodes = job.mem_requested_bytes, job.mem_per_node_bytes, job.nodes
    if not requested or not nodes:
        return None
    per_node = requested / nodes
    if job.state == "OUT_OF_MEMORY":
        return Advice(
            "--mem", _memory_text(per_node * 2), f"ran out of {human_bytes(round(per_node))} of memory per node"
        )
    if not used or not job.is_typical:
        return None
    enough = max(used * _MEM_MARGIN, 256 << 20)
    if enough > per_node / 2:
        return None
    reason = f"requested {human_bytes(round(per_node))} of memory per node, used {human_bytes(used)} at most"
    return Advice("--mem", _memory_text(enough), reason)


def _memory_text(size: float) -> str:
    """Rounded up: to 256 MB below 2 GB, to whole GB below 16, to four GB above."""
    if size < 2 * _GB:
        return f"{math.ceil(size / (256 << 20)) * 256}M"
    step = 1 if size < 16 * _GB else 4
    return f"{math.ceil(size / _GB / step) * step}G"


def _time(job: JobUsage) -> Advice | None:
    limit, took = job.time_limit_s, job.needed_s
    if not limit or not took:
        return None
    if job.state == "TIMEOUT":
        return Advice("--time", slurm_time(limit * 2), f"was ended by its time limit of {slurm_time(limit)}")
    enough = max(300, math.ceil(took * _TIME_MARGIN / 300) * 300)
    if not job.is_typical or enough > limit / 2:
        return None
    reason = f"requested {slurm_time(limit)}, took {slurm_time(round(took))}; a shorter limit lets it start earlier"
    return Advice("--time", slurm_time(enough), reason)


def _cpus(job: JobUsage) -> Advice | None:
    """Fewer CPUs per task, where several for each were idle most of the time."""
    share, cpus, tasks = job.cpu_efficiency, job.cpus, job.tasks
    if share is None or not cpus or not tasks or not job.is_typical or job.gpus:
        return None
    per_task, busy = cpus / tasks, cpus * share / tasks
    enough = max(1, math.ceil(busy * 1.2))
    if per_task < 2 or enough > per_task / 2:
        return None
    reason = f"{per_task:.0f} CPUs per task, of which {busy:.1f} were busy ({share:.0%})"
    return Advice("--cpus-per-task", str(enough), reason)


def _gpus(job: JobUsage) -> Advice | None:
    share, gpus, nodes = job.gpu_utilization, job.gpus, job.nodes or 1
    if share is None or gpus < 2 or share * gpus > gpus / 2 or not job.is_typical:
        return None
    enough = max(1, math.ceil(share * gpus * 1.2 / nodes))
    if enough * nodes >= gpus:
        return None
    return Advice("--gpus-per-node", str(enough), f"{gpus} GPUs were busy {share:.0%} of the time on average")
