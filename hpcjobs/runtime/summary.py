"""The files that a run leaves for reports: summary.json and metrics.jsonl (docs/metrics.md describes both)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from hpcjobs.files import write_beside
from hpcjobs.runtime.numbers import encode, restore
from hpcjobs.runtime.streams import print_error

SUMMARY_SCHEMA = "hpcjobs.summary/1"
METRICS_SCHEMA = "hpcjobs.metrics/1"
MONITOR_SCHEMA = "hpcjobs.monitor/1"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"


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
class Load:
    """Of one node at one time: its cores and network, the memory and storage traffic of its ranks, their GPUs."""

    cpu_percent: float | None = None
    rss_bytes: float | None = None
    network_received_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None


@dataclass(frozen=True)
class Monitored:
    """Over all samples of all nodes; `idle_share` of them found GPUs, or without any the cores, below 5 %."""

    samples: int
    interval_s: float
    idle_share: float
    mean: Load
    peak: Load

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Monitored:
        return cls(**{**raw, "mean": Load(**raw["mean"]), "peak": Load(**raw["peak"])})


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

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ByRank:
        known = {item.name for item in fields(cls)}
        return cls(**{key: None if value is None else tuple(value) for key, value in raw.items() if key in known})


@dataclass(frozen=True)
class RunSummary:
    """One run. None means "not measured". Lists of hosts are by rank."""

    trainer: str
    strategy: str
    workload: str
    status: str
    exit_code: int
    world_size: int
    hosts: tuple[str, ...] = ()
    schema: str = SUMMARY_SCHEMA
    error: str | None = None
    job_id: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    elapsed_s: float | None = None
    nnodes: int | None = None
    device: str | None = None
    device_name: str | None = None
    backend: str | None = None
    threads_per_rank: int | None = None
    precision: str | None = None
    torch_version: str | None = None
    python_version: str | None = None
    parameters: int | None = None
    epochs: float | None = None
    steps: int | None = None
    resumed_from_step: int | None = None
    samples: int | None = None
    batch_size_per_rank: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    throughput: Throughput | None = None
    step_time_s: Quantiles | None = None
    data_wait_s: Quantiles | None = None
    by_rank: ByRank | None = None
    imbalance: float | None = None
    exposed_communication_s: Quantiles | None = None
    checkpoint_stall_s: Quantiles | None = None
    bytes_moved_per_step: int | None = None
    collectives_per_step: int | None = None
    memory_peak_bytes: int | None = None
    flops_per_s: float | None = None
    peak_flops_per_s: float | None = None
    mfu: float | None = None
    loss: float | None = None
    evaluation: Evaluation | None = None
    monitor: Monitored | None = None
    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of a user's script."""
    config: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return write_json(folder / SUMMARY_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """Keys this version does not know are left out; later versions may add some."""
        known = {item.name for item in fields(cls)}
        raw = restore(json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")))
        return cls(**{key: _convert_field(key, value) for key, value in raw.items() if key in known})


_NESTED: Mapping[str, type[Quantiles] | type[Throughput] | type[Evaluation]] = {
    "throughput": Throughput,
    "step_time_s": Quantiles,
    "data_wait_s": Quantiles,
    "exposed_communication_s": Quantiles,
    "checkpoint_stall_s": Quantiles,
    "evaluation": Evaluation,
}


def _convert_field(key: str, value: Any) -> Any:
    if key == "hosts":
        return tuple(value)
    if key == "by_rank" and value is not None:
        return ByRank.from_json(value)
    if key == "monitor" and value is not None:
        return Monitored.from_json(value)
    return _NESTED[key](**value) if key in _NESTED and value is not None else value


def format_utc(time_s: float) -> str:
    """Format seconds since 1970 as the times of summary.json."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write ``value`` as JSON in one step: a reader sees the old file or the complete new one."""
    write_beside(path, encode(value, indent=1) + "\n", mode=None)
    return path


class MetricsLog:
    """Appends one JSON object per line, and flushes each, so that a killed run keeps its lines."""

    def __init__(self, path: Path, *, keep_bytes: int = 0, copy_to: Callable[[str], None] | None = None) -> None:
        """`keep_bytes` of an existing file stay: those written before the resumed checkpoint. `copy_to` gets new lines.

        A file that a crash cut short keeps its complete lines: to grow it would fill the hole with zero bytes.
        """
        self._path, self._keep_bytes, self._copy_to = path, keep_bytes, copy_to
        self._file: FileIO | None = None
        self._unwritten = b""
        self.failure: OSError | None = None
        self.append("")

    def _open(self) -> FileIO:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._keep_bytes:
            print_error(
                f"warning: {self._path} has {size} bytes, and had {self._keep_bytes} bytes when the checkpoint was "
                "written: the lines between are lost"
            )
            self._keep_bytes = self._path.read_bytes().rfind(b"\n") + 1 if size else 0
        if size:
            os.truncate(self._path, self._keep_bytes)
        return FileIO(self._path, "ab")

    def write(self, kind: str, **values: object) -> None:
        """Append a line."""
        self.append(encode({"kind": kind, **values}) + "\n")

    def append(self, lines: str) -> None:
        """Append lines. After a failed write they are kept and written with the next ones."""
        self._unwritten += lines.encode()
        if self._copy_to is not None and lines:
            self._copy_to(lines)
        try:
            self._file = self._file or self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self.failure = None
        except OSError as error:
            if self.failure is None:
                print_error(f"warning: {self._path} can't be written: {error.strerror}")
            self.failure = error

    def tell(self) -> int:
        """Bytes of the file once everything is in it."""
        size = self._keep_bytes if self._file is None else os.fstat(self._file.fileno()).st_size
        return size + len(self._unwritten)

    def close(self) -> None:
        """Raises the OSError that keeps lines from the file."""
        if self._file is not None:
            self._file.close()
        if self._unwritten and self.failure is not None:
            raise self.failure
