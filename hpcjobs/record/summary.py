"""``summary.json``: the result of a run, by rank 0 of a trainer or of a script with `hpcjobs.runtime`.

Other programs may write one, with any keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpcjobs.files import AnyPath, read_regular, write_beside
from hpcjobs.record import SUMMARY
from hpcjobs.record.monitor import Load
from hpcjobs.record.values import convert, decode_object, encode_object, to_json

SCHEMA = "hpcjobs.summary/1"


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of a time per step, over `count` steps."""

    median: float
    p95: float
    count: int
    total: float | None = None
    """Sum over all steps; None: written by a version that did not record it."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """Nearest-rank quantiles: the smallest value that at least that share of the values does not exceed.

        None without values.
        """
        if not values:
            return None
        ranked = sorted(values)
        median, p95 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.95))
        return cls(median, p95, len(ranked), math.fsum(ranked))


@dataclass(frozen=True)
class Throughput:
    """Throughput of all ranks, in a unit such as `images/s`."""

    value: float
    unit: str


@dataclass(frozen=True)
class Evaluation:
    """Over the whole held-out part, each prediction counted once."""

    loss: float
    accuracy: float | None
    predictions: int
    perplexity: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the workload's own


@dataclass(frozen=True)
class Monitored:
    """Over all samples of all nodes; `idle_share` of them found GPUs, or without any the cores, below 5 %."""

    samples: int
    interval_s: float
    idle_share: float
    mean: Load
    peak: Load


@dataclass(frozen=True)
class ByRank:
    """Medians of every rank, by rank. None where not every rank measured it."""

    step_time_s: tuple[float, ...] | None = None  # alike on all: each step waits for the slowest
    data_wait_s: tuple[float, ...] | None = None
    compute_s: tuple[float, ...] | None = None  # of a pass without communication, which waits for no other rank

    @property
    def imbalance(self) -> float | None:
        """How much longer the slowest rank's own work takes than the mean of all ranks: 0.1 is 10 %."""
        if self.compute_s is None or self.data_wait_s is None:
            return None
        own_s = [compute + wait for compute, wait in zip(self.compute_s, self.data_wait_s, strict=True)]
        return max(own_s) * len(own_s) / sum(own_s) - 1 if sum(own_s) > 0 else None


@dataclass(frozen=True)
class RunSummary:
    """One run. None means "not measured". Lists of hosts are by rank."""

    trainer: str
    """Name of the trainer, or of the script."""
    strategy: str
    """How the ranks share the work, such as ``ddp``."""
    workload: str
    """Name of the workload."""
    status: str
    """``completed`` or ``failed``."""
    exit_code: int
    """The trainer's own code."""
    world_size: int
    """Ranks."""
    hosts: tuple[str, ...] = ()
    """Host by rank."""
    schema: str = SCHEMA
    """``hpcjobs.summary/1``."""
    error: str | None = None
    """The one line that the user saw."""
    job_id: str | None = None
    """``HPCJOBS_JOB_ID``."""
    started_at: str | None = None
    """UTC."""
    ended_at: str | None = None
    """UTC."""
    elapsed_s: float | None = None
    """Training and evaluation, without start-up."""
    nnodes: int | None = None
    """Distinct hosts."""
    device: str | None = None
    """``cuda`` or ``cpu``."""
    device_name: str | None = None
    """Its model."""
    backend: str | None = None
    """Which library carried the gradients: ``gloo``, ``nccl``, ``horovod-mpi``, ``horovod-gloo``."""
    threads_per_rank: int | None = None
    """Threads of torch."""
    precision: str | None = None
    """``fp32``, ``bf16`` or ``fp16``."""
    torch_version: str | None = None
    python_version: str | None = None
    parameters: int | None = None
    """Number of parameters of the complete model."""
    epochs: float | None = None
    """Epochs that were trained, also parts of one."""
    steps: int | None = None
    """Finished steps."""
    resumed_from_step: int | None = None
    """Finished steps of the checkpoint that this run resumed."""
    samples: int | None = None
    """Samples that all ranks used; the last batch of an epoch may be smaller."""
    batch_size_per_rank: int | None = None
    """Samples of a step on one rank."""
    global_batch_size: int | None = None
    """Samples of a step on all ranks."""
    lr: float | None = None
    """Learning rate after scaling."""
    throughput: Throughput | None = None
    """Work of all ranks over the time of the steps that did it, without evaluations, checkpoints and the first two
    steps (of a script the first two lines of metrics, if there are more)."""
    step_time_s: Quantiles | None = None
    """Of rank 0, data wait included, without the first two."""
    data_wait_s: Quantiles | None = None
    """The part of a step spent waiting for its batch, on rank 0."""
    by_rank: ByRank | None = None
    """Medians of every rank, by rank. Step times are alike, since each step waits for the slowest rank. ``compute_s``
    is a forward and backward pass without communication, taken from the passes that measure exposed communication; null
    without them."""
    imbalance: float | None = None
    """The largest ``compute_s`` + ``data_wait_s`` of a rank over the mean of all ranks, less 1: 0.1 is a slowest rank
    that takes 10 % longer than the mean."""
    epoch_s: Quantiles | None = None
    """Of complete epochs of a trainer, with their evaluations and checkpoints."""
    evaluation_share: float | None = None
    """The part of these epochs that was spent in evaluations, 0 to 1."""
    data_wait_share: float | None = None
    """The part of these epochs that rank 0 spent waiting for batches, 0 to 1."""
    exposed_communication_s: Quantiles | None = None
    """The part of a step that waits for gradients of other ranks ([below](#exposed-communication))."""
    checkpoint_stall_s: Quantiles | None = None
    """How long saving held up training."""
    bytes_moved_per_step: int | None = None
    """Bytes that one rank hands to collectives of gradients and weights."""
    collectives_per_step: int | None = None
    """Number of these calls."""
    memory_peak_bytes: int | None = None
    """The largest of any rank: device memory on a GPU, resident memory otherwise."""
    flops_per_s: float | None = None
    """Of all ranks: done ([below](#mfu))."""
    peak_flops_per_s: float | None = None
    """Of all ranks: stated by the maker."""
    mfu: float | None = None
    """The ratio of the two."""
    loss: float | None = None
    """Mean over ranks and over the steps of the last line of metrics."""
    evaluation: Evaluation | None = None
    """Evaluation of the held-out part at the end."""
    monitor: Monitored | None = None
    """With ``--monitor``, over the samples of all nodes. ``mean`` and ``peak`` have the keys of a trainer's sample;
    ``idle_share`` of the samples found the GPUs (without GPUs the cores) below 5 %."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of your own script: the arguments of ``Run.finish()``, and the newest value of each metric of your own
    that it logged."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The value of every flag; null is "the workload's default"."""

    def write(self, folder: Path) -> Path:
        """Write ``summary.json`` of ``folder``. Raises OSError."""
        return write_json(folder / SUMMARY, to_json(self))

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """Read ``summary.json`` of ``folder``; keys that this version does not know are left out.

        Raises OSError: it cannot be read. ValueError: it holds another value.
        """
        return convert(read_summary(folder / SUMMARY), cls)


def read_summary(path: AnyPath) -> dict[str, Any]:
    """Read all keys of a ``summary.json`` of any program, NaN and infinities restored.

    Raises OSError: it cannot be read. ValueError: it holds no JSON object.
    """
    try:
        results = decode_object(read_regular(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if results is None:
        raise ValueError("no JSON object")
    return results


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float]]:
    """The text and numbers of nested mappings, keys joined by dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, (str, int, float)):
            yield f"{prefix}{key}", value


def format_utc(time_s: float) -> str:
    """Format seconds since 1970 as the times of summary.json."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write ``value`` as JSON in one step: a reader sees the old file or the complete new one."""
    write_beside(path, encode_object(value, indent=1) + "\n", mode=None)
    return path
