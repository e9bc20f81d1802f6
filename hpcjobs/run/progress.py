"""What a running job's trainer has written last: metrics.jsonl and monitor.jsonl, read from their ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcjobs.run.folder import output_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.log_file import Tail
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import Connect
from hpcjobs.run.wait import Watch
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.outage import Report, discard
from hpcjobs.units import human_bytes

T = TypeVar("T")
_END_BYTES = 1 << 16
_POLL_S = 0.5


class Step(msgspec.Struct, frozen=True):
    """A `step` line of metrics.jsonl, as far as it is shown."""

    step: int
    epoch: int
    loss: float | None = None
    throughput: float | None = None
    unit: str | None = None

    def __str__(self) -> str:
        words = [f"step {self.step}", f"epoch {self.epoch}"]
        words += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        words += [] if self.throughput is None else [f"{self.throughput:,.0f} {self.unit or ''}".rstrip()]
        return ", ".join(words)


class Sample(msgspec.Struct, frozen=True):
    """A `sample` line of monitor.jsonl; None: not measured there."""

    time_s: float
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

    def __str__(self) -> str:
        shown: list[tuple[str, float | None, Callable[[float], str]]] = [
            ("CPU", self.cpu_percent, lambda value: f"{value:.0f} %"),
            ("memory", self.rss_bytes, lambda value: human_bytes(int(value))),
            ("GPU", self.gpu_percent, lambda value: f"{value:.0f} %"),
            ("GPU memory", self.gpu_memory_bytes, lambda value: human_bytes(int(value))),
            ("GPU power", self.gpu_power_w, lambda value: f"{value:.0f} W"),
            ("GPU temperature", self.gpu_temperature_c, lambda value: f"{value:.0f} °C"),
            ("received", self.network_received_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
            ("sent", self.network_sent_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
            ("read", self.read_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
            ("written", self.written_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
        ]
        return ", ".join(f"{name} {text(value)}" for name, value, text in shown if value is not None)


class NodeSample(msgspec.Struct, frozen=True):
    """The newest sample of a node, and when it was taken (seconds since 1970, by the node's clock)."""

    host: str
    taken: float
    sample: Sample


class _Head(msgspec.Struct, frozen=True):
    """The first line of monitor.jsonl."""

    host: str
    started_at: float


def newest_step(run_dir: Path) -> Step | None:
    """The last `step` line; None before the first one."""
    lines = (_decode_line(line, Step, kind="step") for line in reversed(_last_lines(run_dir / "metrics.jsonl")))
    return next((step for step in lines if step is not None), None)


def newest_samples(run_dir: Path) -> list[NodeSample]:
    """The last sample of each node, in the order of nodes; empty without --monitor."""
    return [sample for path in monitor_files(run_dir) if (sample := _newest_sample(path)) is not None]


def monitor_files(run_dir: Path) -> list[Path]:
    """monitor.jsonl of the first node, then those of the others by number."""
    number = {path: int(path.stem.partition("-")[2] or 0) for path in run_dir.glob("monitor*.jsonl") if _is_ours(path)}
    return sorted(number, key=lambda path: number[path])


def _is_ours(path: Path) -> bool:
    return path.stem == "monitor" or path.stem.removeprefix("monitor-").isdecimal()


def _newest_sample(path: Path) -> NodeSample | None:
    head = _head(path)
    lines = (_decode_line(line, Sample, kind="sample") for line in reversed(_last_lines(path)))
    sample = next((sample for sample in lines if sample is not None), None)
    return None if head is None or sample is None else NodeSample(head.host, head.started_at + sample.time_s, sample)


def _head(path: Path) -> _Head | None:
    try:
        with path.open("rb") as file:
            return _decode_line(file.readline(_END_BYTES), _Head, kind="monitor")
    except OSError:  # removed meanwhile: as if it had not begun
        return None


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            return file.read().splitlines()
    except OSError:  # not there yet
        return []


def _decode_line(line: bytes, type: type[T], *, kind: str) -> T | None:
    """The line as ``type``; None for a line of another kind, or one that is cut off."""
    try:
        raw = json.loads(line)  # which also reads a loss of NaN
        return msgspec.convert(raw, type) if isinstance(raw, dict) and raw.get("kind") == kind else None
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def samples(entry: Entry) -> Iterator[str]:
    """Every sample so far, a line each, the nodes one after the other."""
    for path in all_monitor_files(entry):
        yield from _shown(path, Tail(path).news(last=True))


def follow_samples(
    entry: Entry,
    *,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> Iterator[str]:
    """Samples of all nodes as they come, until the job has ended."""
    watch = Watch([entry], connect=connect, clock=clock, report=report)
    tails: dict[Path, Tail] = {}
    while True:
        over = not watch.look()
        for path in all_monitor_files(entry):
            yield from _shown(path, tails.setdefault(path, Tail(path)).news(last=over))
        if over:
            return
        pause(_POLL_S)


def all_monitor_files(entry: Entry) -> list[Path]:
    """Those of the entry's job, or of all tasks of its array."""
    folders = [output_dir(Path(entry.run_dir), job_id) for job_id in own_ids(entry)]
    return [path for folder in folders for path in monitor_files(folder)]


def _shown(path: Path, lines: Iterable[str]) -> Iterator[str]:
    head = _head(path)
    for line in lines:
        sample = _decode_line(line.encode(), Sample, kind="sample")
        if head is not None and sample is not None:
            taken = time.strftime("%H:%M:%S", time.localtime(head.started_at + sample.time_s))
            yield f"{head.host}  {taken}  {sample}\n"
