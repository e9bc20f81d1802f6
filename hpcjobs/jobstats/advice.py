"""Suggests resources for the next submission from the usage of jobs.

Margins: memory a third above the fullest node seen (at least 256 MB), rounded up to a step people write;
time 1.5 x the run time. For a run that did not complete, the only advice is more of the resource that
ran out. Runs of less than a minute give no advice: their peaks were not sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcjobs.units import human_bytes, slurm_time

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
    if job.state != "COMPLETED" or not used or not _long_enough(job):
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
    if job.state != "COMPLETED" or not _long_enough(job) or enough > limit / 2:
        return None
    reason = f"requested {slurm_time(limit)}, took {slurm_time(round(took))}; a shorter limit lets it start earlier"
    return Advice("--time", slurm_time(enough), reason)


def _cpus(job: JobUsage) -> Advice | None:
    """Fewer CPUs per task, where several for each were idle most of the time."""
    share, cpus, tasks = job.cpu_efficiency, job.cpus, job.tasks
    if share is None or not cpus or not tasks or job.state != "COMPLETED" or not _long_enough(job) or job.gpus:
        return None
    per_task, busy = cpus / tasks, cpus * share / tasks
    enough = max(1, math.ceil(busy * 1.2))
    if per_task < 2 or enough > per_task / 2:
        return None
    reason = f"{per_task:.0f} CPUs per task, of which {busy:.1f} were busy ({share:.0%})"
    return Advice("--cpus-per-task", str(enough), reason)


def _gpus(job: JobUsage) -> Advice | None:
    share, gpus, nodes = job.gpu_utilization, job.gpus, job.nodes or 1
    if share is None or gpus < 2 or share * gpus > gpus / 2 or job.state != "COMPLETED" or not _long_enough(job):
        return None
    enough = max(1, math.ceil(share * gpus * 1.2 / nodes))
    if enough * nodes >= gpus:
        return None
    return Advice("--gpus-per-node", str(enough), f"{gpus} GPUs were busy {share:.0%} of the time on average")


def _long_enough(job: JobUsage) -> bool:
    return bool(job.needed_s and job.needed_s >= _SHORTEST_S)
