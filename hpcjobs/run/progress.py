"""What a running job's trainer has written last: metrics.jsonl and monitor.jsonl, read from their ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from hpcjobs.run.folder import output_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.log_file import Tail
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import Connect
from hpcjobs.run.wait import Watch
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.outage import Report, discard
from hpcjobs.units import human_bytes, human_duration

T = TypeVar("T")
_END_BYTES = 1 << 16
_POLL_S = 0.5
_MOST_STEPS = 2**63 - 1
_SPEED_LINES = 20
"""So many of the last lines tell the speed."""


class Step(msgspec.Struct, frozen=True):
    """A `step` line of metrics.jsonl, as far as it is shown."""

    step: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]
    epoch: int | None = None
    loss: float | None = None
    throughput: float | None = None
    unit: str | None = None
    time_s: float | None = None
    """Since the trainer's start."""

    def __str__(self) -> str:
        return self.describe(f"{self.step}")

    def describe(self, step: str) -> str:
        """All that is known, with ``step`` in the place of the number."""
        arguments = [f"step {step}"]
        arguments += [] if self.epoch is None else [f"epoch {self.epoch}"]
        arguments += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        arguments += [] if self.throughput is None else [f"{self.throughput:,.0f} {self.unit or ''}".rstrip()]
        return ", ".join(arguments)


class _Run(msgspec.Struct, frozen=True):
    """A `run` line of metrics.jsonl: a trainer has started here, or started again."""

    total_steps: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)] | None = None
    """0: not known, as None."""


class Progress(msgspec.Struct, frozen=True):
    """How far a trainer is, by the end of its metrics.jsonl."""

    step: Step
    """The newest one."""
    losses: tuple[float, ...]
    """Of the last lines, oldest first, without those that are no number."""
    total_steps: int | None = None
    steps_per_s: float | None = None
    """Since the trainer's last start, over the last lines; None: one line is too few."""

    @property
    def share(self) -> float | None:
        """The part of all steps that is done, 0 to 1; None where the trainer did not write how many there are."""
        return min(1.0, self.step.step / self.total_steps) if self.total_steps else None

    @property
    def remaining_s(self) -> float | None:
        """How long the steps that are left take at the speed of the last ones."""
        if self.total_steps is None or not self.steps_per_s:
            return None
        return max(0, self.total_steps - self.step.step) / self.steps_per_s

    @property
    def of_total(self) -> str:
        """``120/1000``, or ``120`` where the number of steps is not known."""
        return f"{self.step.step}" if self.total_steps is None else f"{self.step.step}/{self.total_steps}"

    @property
    def time_left(self) -> str | None:
        """``3m20s left``; None: not known."""
        return None if self.remaining_s is None else f"{human_duration(self.remaining_s)} left"

    def __str__(self) -> str:
        return ", ".join([self.step.describe(self.of_total), *([] if self.time_left is None else [self.time_left])])


class Staging(msgspec.Struct, frozen=True):
    """staging.json: how far the copies of `--stage-to` are; the node is the one furthest behind."""

    nodes: int
    ready: int
    host: str
    files: int
    files_total: int
    size_bytes: int
    total_bytes: int
    waits: bool = False

    def __str__(self) -> str:
        done, total = human_bytes(self.size_bytes), human_bytes(self.total_bytes)
        last = f"{self.host}: {self.files:,} of {self.files_total:,} files, {done} of {total}"
        last = f"{self.host} waits for another job's copy" if self.waits else last
        return f"copied to the nodes' disks: {self.ready} of {self.nodes} ready; {last}"


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
    # Of `hpcjobs monitor` alone:
    cores: int | None = None
    memory_limit_bytes: float | None = None
    gpus: int | None = None
    busy_percent: float | None = None
    """Mean of the last minute: of the GPUs, where there are none of the cores."""
    idle_s: float | None = None
    """How long they have been below 5 %."""
    ranks: int | None = None
    """Ranks that are alive."""
    ended_ranks: list[int] | None = None
    """Ranks that were seen and are no longer there."""
    ended_s: float | None = None
    """Since the first of them was missing."""

    def __str__(self) -> str:
        shown: list[tuple[str, float | None, Callable[[float], str]]] = [
            ("CPU", self.cpu_percent, lambda value: f"{value:.0f} %"),
            ("memory", self.rss_bytes, self._memory),
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

    def _memory(self, used_bytes: float) -> str:
        limit = f" of {human_bytes(int(self.memory_limit_bytes))}" if self.memory_limit_bytes else ""
        return human_bytes(int(used_bytes)) + limit


class NodeSample(msgspec.Struct, frozen=True):
    """The newest sample of a node, and when it was taken (seconds since 1970, by the node's clock)."""

    host: str
    taken: float
    sample: Sample


class NodeSamples(msgspec.Struct, frozen=True):
    """All samples of a node, oldest first."""

    host: str
    started_at: float
    samples: tuple[Sample, ...]


class _End(msgspec.Struct, frozen=True):
    """The last line of monitor.jsonl, once its sampler has ended."""


class _Head(msgspec.Struct, frozen=True):
    """The first line of monitor.jsonl."""

    host: str
    started_at: float


def newest_step(run_dir: Path) -> Step | None:
    """The last `step` line; None before the first one."""
    lines = (_decode_line(line, Step, kind="step") for line in reversed(_last_lines(run_dir / "metrics.jsonl")))
    return next((step for step in lines if step is not None), None)


def read_progress(run_dir: Path) -> Progress | None:
    """The progress by the last lines; None before the first step."""
    path = run_dir / "metrics.jsonl"
    lines = _last_lines(path)
    all_steps: list[Step] = []
    since_start: list[Step] = []
    run = None
    for line in lines:
        if (step := _decode_line(line, Step, kind="step")) is not None:
            if since_start and step.step < since_start[-1].step:  # a program that counts anew without a `run` line
                since_start = []
            all_steps.append(step)
            since_start.append(step)
        elif (started := _decode_line(line, _Run, kind="run")) is not None:
            run, since_start = started, []
    if not all_steps:
        return None
    run = run or _decode_line(_first_line(path), _Run, kind="run")
    losses = tuple(step.loss for step in all_steps if step.loss is not None and math.isfinite(step.loss))
    return Progress(
        step=all_steps[-1],
        losses=losses,
        total_steps=(run.total_steps or None) if run is not None else None,
        steps_per_s=_speed(since_start[-_SPEED_LINES:]),
    )


def job_progress(run_dir: str | None, job_id: str) -> Progress | None:
    """The progress of a job or array task; None: it writes none, or has no run folder."""
    return None if run_dir is None else read_progress(output_dir(Path(run_dir), job_id))


def read_staging(run_dir: Path) -> Staging | None:
    """The progress of copying data; None: no copy is being made."""
    try:
        return msgspec.json.decode((run_dir / "staging.json").read_bytes(), type=Staging)
    except (OSError, ValueError):  # not there, or from a newer hpcjobs
        return None


def job_staging(run_dir: str | None, job_id: str) -> Staging | None:
    """The progress of a job's or array task's copies."""
    return None if run_dir is None else read_staging(output_dir(Path(run_dir), job_id))


def _speed(steps: list[Step]) -> float | None:
    if len(steps) < 2 or steps[0].time_s is None or steps[-1].time_s is None:
        return None
    passed = steps[-1].time_s - steps[0].time_s
    return (steps[-1].step - steps[0].step) / passed if passed > 0 else None


def newest_samples(run_dir: Path) -> list[NodeSample]:
    """The last sample of each node, in the order of nodes; empty without --monitor."""
    return [sample for path in monitor_files(run_dir) if (sample := _newest_sample(path)) is not None]


def all_samples(run_dir: Path) -> list[NodeSamples]:
    """Every sample of each node, in the order of nodes."""
    nodes = []
    for path in monitor_files(run_dir):
        head, lines = _head(path), Tail(path).news(last=True)
        read = tuple(s for line in lines if (s := _decode_line(line.encode(), Sample, kind="sample")) is not None)
        if head is not None and read:
            nodes.append(NodeSamples(head.host, head.started_at, read))
    return nodes


def has_live_sampler(run_dir: Path, *, now: float, fresh_s: float) -> bool:
    """Whether somebody takes samples there now: a file's newest one is fresh, and its sampler has not ended."""
    return any(
        (sample := _newest_sample(path)) is not None
        and now - sample.taken < fresh_s
        and not any(_decode_line(line, _End, kind="end") is not None for line in _last_lines(path)[-1:])
        for path in monitor_files(run_dir)
    )


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
    return _decode_line(_first_line(path), _Head, kind="monitor")


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.readline(_END_BYTES)
    except OSError:  # removed meanwhile: as if it had not begun
        return b""


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
