"""Reads the progress of a running job and the load of its nodes."""

from __future__ import annotations

import math
import shlex
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import open_regular, read_regular
from hpcjobs.record import MANIFEST, METRICS, SUMMARY
from hpcjobs.record.manifest import Manifest, RecordedCode, RequestedJob, read_manifest
from hpcjobs.record.metrics import RunLine, decode_figure, decode_run, decode_step
from hpcjobs.record.monitor import Head, Sample, decode_head, decode_sample, find_files, is_end
from hpcjobs.record.state import Attempt, FirstFailure
from hpcjobs.record.summary import flatten, read_summary
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    Tail,
    first_line,
    last_lines,
    output_dir,
    own_ids,
    read_attempts,
    read_state,
    read_usable,
    task_dir,
)
from hpcjobs.run.status import statuses
from hpcjobs.run.wait import Watch
from hpcjobs.scheduler.base import JobRecord, Report, State, discard
from hpcjobs.site.checks import Moment
from hpcjobs.slurm_commands import read_hosts
from hpcjobs.units import human_bytes, human_duration, slurm_time

_SPEED_LINES = 20
"""Number of newest lines that give the speed."""


class StepProgress(msgspec.Struct, frozen=True):
    """The shown values of a `step` line of metrics.jsonl, or of the newest figures of a log."""

    step: int | None = None
    """None: the program writes no steps, and the figures are from its log."""
    epoch: int | float | None = None
    loss: float | None = None
    throughput: float | None = None
    unit: str | None = None
    time_s: float | None = None
    """Since the trainer's start."""
    diverged_at: int | None = None
    """First step after the last finite loss, if the newest loss is NaN or infinite. None: not in the last lines."""
    figures: str | None = None
    """The newest value of each figure of the log: ``1,003 tokens/s, loss 2.4``."""

    def __str__(self) -> str:
        return self.describe(f"{self.step}")

    def describe(self, step: str) -> str:
        """All that is known, with ``step`` in the place of the number."""
        arguments = [] if self.step is None else [f"step {step}"]
        arguments += [] if self.epoch is None else [f"epoch {self.epoch:g}"]
        arguments += [] if self.loss is None else [self.loss_text]
        if self.figures is not None:
            return ", ".join([*arguments, self.figures])
        arguments += [] if self.throughput is None else [f"{self.throughput:,.0f} {self.unit or ''}".rstrip()]
        return ", ".join(arguments)

    @property
    def loss_text(self) -> str:
        """``loss 0.1234``, or ``loss NaN since step 40``."""
        assert self.loss is not None
        value = "NaN" if math.isnan(self.loss) else f"{self.loss:.4g}"
        return f"loss {value}" + ("" if self.diverged_at is None else f" since step {self.diverged_at}")

    @property
    def has_diverged(self) -> bool:
        """The loss is NaN or infinite."""
        return self.loss is not None and not math.isfinite(self.loss)


class FigureRow(msgspec.Struct, frozen=True):
    """The shown values of a `figure` line of metrics.jsonl."""

    name: str
    value: float
    unit: str = ""
    time_s: float | None = None

    def __str__(self) -> str:
        number = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.4g}"
        own_name = "" if self.name == self.unit else f"{self.name} "
        return f"{own_name}{number} {self.unit}".rstrip()


class Progress(msgspec.Struct, frozen=True):
    """How far a trainer is, by the end of its metrics.jsonl."""

    step: StepProgress
    """The newest one."""
    losses: tuple[float, ...]
    """Finite losses of the last lines, oldest first."""
    total_steps: int | None = None
    steps_per_s: float | None = None
    """Since the trainer's last start, over the last lines; None: one line is too few."""

    @property
    def share(self) -> float | None:
        """The part of all steps that is done, 0 to 1; None where the trainer did not write how many there are."""
        step = self.step.step
        return min(1.0, step / self.total_steps) if self.total_steps and step is not None else None

    @property
    def remaining_s(self) -> float | None:
        """How long the steps that are left take at the speed of the last ones."""
        if self.total_steps is None or not self.steps_per_s or self.step.step is None:
            return None
        return max(0, self.total_steps - self.step.step) / self.steps_per_s

    @property
    def of_total(self) -> str:
        """``120/1000``, or ``120`` if the number of steps is not known; empty for a log with figures alone."""
        if self.step.step is None:
            return ""
        return f"{self.step.step}" if self.total_steps is None else f"{self.step.step}/{self.total_steps}"

    @property
    def time_left(self) -> str | None:
        """``3m20s left``; None: not known."""
        return None if self.remaining_s is None else f"{human_duration(self.remaining_s)} left"

    def __str__(self) -> str:
        return ", ".join([self.step.describe(self.of_total), *([] if self.time_left is None else [self.time_left])])


class StagingProgress(msgspec.Struct, frozen=True):
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


_LONGEST_BYTES = 1 << 22
"""No trainer writes a longer line."""


class RunLines:
    """The newest `run` line of each metrics.jsonl, wherever in it; each byte of a file is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, RunLine | None]] = {}
        """File -> bytes of complete lines that were read, and their last `run` line."""

    def newest(self, path: Path) -> RunLine | None:
        """None: the file has none, or is not there."""
        position, run = self._known.get(path, (0, None))
        try:
            with open_regular(path) as file:
                if file.seek(0, 2) < position:  # the file was replaced
                    position, run = 0, None
                file.seek(position)
                for line in iter(partial(file.readline, _LONGEST_BYTES), b""):
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    run = decode_run(line) or run
        except OSError:
            return None
        self._known[path] = position, run
        return run


def _decode_step(line: bytes) -> StepProgress | None:
    step = decode_step(line)
    if step is None:
        return None
    return StepProgress(step.step, step.epoch, step.loss, step.throughput, step.unit, step.time_s)


def newest_step(run_dir: Path) -> StepProgress | None:
    """The last `step` line, and the figures of the log; None before the first one."""
    progress = read_progress(run_dir)
    return None if progress is None else progress.step


def _newest(steps: list[StepProgress]) -> StepProgress:
    """The last of some lines, with the step at which its loss has diverged."""
    with_loss = [step for step in steps if step.loss is not None]
    finite = next((n for n in reversed(range(len(with_loss))) if not with_loss[n].has_diverged), None)
    if finite is None or not steps[-1].has_diverged:
        return steps[-1]
    return msgspec.structs.replace(steps[-1], diverged_at=with_loss[finite + 1].step)


def read_progress(run_dir: Path, run_lines: RunLines | None = None) -> Progress | None:
    """The progress by the last lines; None before the first step. ``run_lines`` spares who reads again most of it."""
    path = run_dir / METRICS
    lines = last_lines(path)
    all_steps: list[StepProgress] = []
    figures: dict[str, FigureRow] = {}
    since_start: list[StepProgress] = []
    run = None
    for line in lines:
        if (step := _decode_step(line)) is not None:
            # A program may restart its count without a `run` line.
            if since_start and (step.step or 0) < (since_start[-1].step or 0):
                since_start = []
            all_steps.append(step)
            since_start.append(step)
        elif (figure := decode_figure(line)) is not None:
            figures[figure.name] = FigureRow(*figure)
        elif (started := decode_run(line)) is not None:
            run, since_start, figures = started, [], {}
    if not all_steps and not figures:
        return None
    run = run or (run_lines or RunLines()).newest(path)
    losses = tuple(step.loss for step in all_steps if step.loss is not None and math.isfinite(step.loss))
    return Progress(
        step=_add_figures(_newest(all_steps) if all_steps else StepProgress(), figures.values()),
        losses=losses,
        total_steps=(run.total_steps or None) if run is not None else None,
        steps_per_s=_speed(since_start[-_SPEED_LINES:]),
    )


def _add_figures(step: StepProgress, figures: Collection[FigureRow]) -> StepProgress:
    """``step`` with the newest figures of the log; the first one with a unit is the speed, where the step has none."""
    if not figures:
        return step
    rate = next((figure for figure in figures if figure.unit), None)
    if step.throughput is None and rate is not None:
        step = msgspec.structs.replace(step, throughput=rate.value, unit=rate.unit)
    return msgspec.structs.replace(step, figures=", ".join(map(str, figures)))


def job_progress(run_dir: str | None, job_id: str) -> Progress | None:
    """The progress of a job or array task; None: it writes none, or has no run folder."""
    return None if run_dir is None else read_progress(output_dir(Path(run_dir), job_id))


def read_staging(run_dir: Path) -> StagingProgress | None:
    """The progress of copying data; None: no copy is being made."""
    try:
        return msgspec.json.decode(read_regular(run_dir / "staging.json"), type=StagingProgress)
    except (OSError, ValueError):  # not there, or from a newer hpcjobs
        return None


def job_staging(run_dir: str | None, job_id: str) -> StagingProgress | None:
    """The progress of a job's or array task's copies."""
    return None if run_dir is None else read_staging(output_dir(Path(run_dir), job_id))


def _speed(steps: list[StepProgress]) -> float | None:
    lines = [(step.step, step.time_s) for step in steps]
    if len(lines) < 2:
        return None
    (first, began), (last, ended) = lines[0], lines[-1]
    if first is None or last is None or began is None or ended is None:
        return None
    return (last - first) / (ended - began) if ended > began else None


_POLL_S = 0.5
_CLOCKS_DIFFER_S = 2.0
"""Tolerated difference between the clocks of a node and of the scheduler."""


class NodeSample(msgspec.Struct, frozen=True):
    """The newest sample of a node, and when it was taken (seconds since 1970, by the node's clock)."""

    host: str
    taken: Moment
    sample: Sample


class OpenSampler(NamedTuple):
    """A sampler that has not written its end; it may have been killed."""

    newest: NodeSample
    interval_s: float


class NodeSamples(msgspec.Struct, frozen=True):
    """All samples of a node, oldest first."""

    host: str
    started_at: float
    samples: tuple[Sample, ...]


def describe_sample(sample: Sample) -> str:
    """Format the measured values."""
    shown: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("CPU", sample.cpu_percent, lambda value: f"{value:.0f} %"),
        ("memory", sample.rss_bytes, partial(_describe_memory, sample)),
        ("GPU", sample.gpu_percent, lambda value: f"{value:.0f} %"),
        ("GPU memory", sample.gpu_memory_bytes, lambda value: human_bytes(int(value))),
        ("GPU power", sample.gpu_power_w, lambda value: f"{value:.0f} W"),
        ("GPU temperature", sample.gpu_temperature_c, lambda value: f"{value:.0f} °C"),
        ("received", sample.network_received_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
        ("sent", sample.network_sent_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
        ("read", sample.read_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
        ("written", sample.written_bytes_per_s, lambda value: f"{human_bytes(int(value))}/s"),
    ]
    return ", ".join(f"{name} {text(value)}" for name, value, text in shown if value is not None)


def _describe_memory(sample: Sample, used_bytes: float) -> str:
    limit = f" of {human_bytes(int(sample.memory_limit_bytes))}" if sample.memory_limit_bytes else ""
    counted = " (RSS, shared memory counted for each process)" if sample.memory_source == "rss" else ""
    return human_bytes(int(used_bytes)) + limit + counted


def newest_samples(run_dir: Path) -> list[NodeSample]:
    """The last sample of each node, in the order of nodes; empty without --monitor."""
    return [sample for path in monitor_files(run_dir) if (sample := _newest_sample(path)) is not None]


def current_samples(nodes: Iterable[NodeSample], record: JobRecord) -> list[NodeSample]:
    """The newest sample of each host that the job has now; files of an attempt before it may name others.

    Where no sample is of a host that the scheduler names, it counts hosts by other names than they have themselves.
    """
    own = [node for node in nodes if record.started is None or node.taken >= record.started - _CLOCKS_DIFFER_S]
    newest = {node.host: node for node in sorted(own, key=lambda node: node.taken)}
    hosts = {_short(host) for host in read_hosts(record.node_list)}
    listed = {host for host in newest if _short(host) in hosts} or set(newest)
    return [node for node in own if node.host in listed and newest[node.host] is node]


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def all_samples(run_dir: Path) -> list[NodeSamples]:
    """Every sample of each node, in the order of nodes."""
    nodes = []
    for path in monitor_files(run_dir):
        head, lines = _head(path), _tail(path).news(last=True)
        read = tuple(s for line in lines if (s := decode_sample(line.encode())) is not None)
        if head is not None and read:
            nodes.append(NodeSamples(head.host, head.started_at, read))
    return nodes


_MOST_SAMPLES_BYTES = 1 << 28
"""A week of samples, one per second."""


def _tail(path: Path) -> Tail:
    """The samples of a file; of a larger one, with a warning, those at its end."""
    size = path.stat().st_size
    if size <= _MOST_SAMPLES_BYTES:
        return Tail(path)
    text = f"{path} is larger than {_MOST_SAMPLES_BYTES >> 20} MiB: only the samples at its end are read"
    warnings.warn(text, HpcJobsWarning, stacklevel=2)
    return Tail(path, start=size - _MOST_SAMPLES_BYTES)


def open_samplers(run_dir: Path) -> list[OpenSampler]:
    """The samplers that have taken a sample and have not written their end."""
    return [
        OpenSampler(newest, head.interval_s)
        for path in monitor_files(run_dir)
        if (head := _head(path)) is not None
        and (newest := _newest_sample(path)) is not None
        and not any(map(is_end, last_lines(path)[-1:]))
    ]


def monitor_files(run_dir: Path) -> list[Path]:
    """monitor.jsonl of the first node, then the files of the others by number."""
    return [Path(path) for path in find_files(run_dir)] if run_dir.is_dir() else []


def _newest_sample(path: Path) -> NodeSample | None:
    head = _head(path)
    lines = (decode_sample(line) for line in reversed(last_lines(path)))
    sample = next((sample for sample in lines if sample is not None), None)
    return None if head is None or sample is None else NodeSample(head.host, head.started_at + sample.time_s, sample)


def _head(path: Path) -> Head | None:
    return decode_head(first_line(path))


def samples(entry: Entry) -> Iterator[str]:
    """Every sample until now, a line each, the nodes one after the other."""
    for path in all_monitor_files(entry):
        yield from _select_lines(path, _tail(path).news(last=True))


def follow_samples(entry: Entry, *, report: Report = discard) -> Iterator[str]:
    """Samples of all nodes as they come, until the job has ended."""
    watch = Watch([entry], report=report)
    tails: dict[Path, Tail] = {}
    while True:
        over = not watch.look()
        for path in all_monitor_files(entry):
            if path not in tails:
                tails[path] = _tail(path)
            yield from _select_lines(path, tails[path].news(last=over))
        if over:
            return
        time.sleep(_POLL_S)


def all_monitor_files(entry: Entry) -> list[Path]:
    """Those of the entry's job, or of all tasks of its array."""
    folders = [output_dir(Path(entry.run_dir), job_id) for job_id in own_ids(entry)]
    return [path for folder in folders for path in monitor_files(folder)]


def _select_lines(path: Path, lines: Iterable[str]) -> Iterator[str]:
    head = _head(path)
    for line in lines:
        sample = decode_sample(line.encode())
        if head is not None and sample is not None:
            taken = time.strftime("%H:%M:%S", time.localtime(head.started_at + sample.time_s))
            yield f"{head.host}  {taken}  {describe_sample(sample)}\n"


IDLE_S = 600.0
"""Idle time of allocated GPUs that gives an alarm."""
ENDED_S = 60.0
"""Ranks may end one after the other; one that is missing for longer, while others run, is dead."""
MEMORY_SHARE = 0.9
_BUSY, _WAITING, _APART = 90.0, 50.0, 0.6


class Alarm(NamedTuple):
    """An alarm of kind `idle GPUs`, `dead rank`, `memory` or `load`, and its text."""

    host: str
    kind: str
    text: str


def find_alarms(nodes: Sequence[NodeSample]) -> list[Alarm]:
    """Held but idle GPUs, a dead rank, memory close to the limit, one node unlike the others."""
    alive = any(node.sample.ranks for node in nodes)
    return [alarm for node in nodes for alarm in _of_node(node, ranks_are_alive=alive)] + _unlike_the_others(nodes)


def idle_s(nodes: Sequence[NodeSample], *, expected: int) -> float | None:
    """How long every node has been idle: its GPUs, where it holds none its cores.

    None: fewer than the ``expected`` nodes have a sample, or one of them does not tell.
    """
    times = [node.sample.idle_s for node in nodes]
    return None if len(times) < expected or None in times else min(time for time in times if time is not None)


def _of_node(node: NodeSample, *, ranks_are_alive: bool) -> list[Alarm]:
    sample = node.sample
    alarms: list[Alarm] = []
    if sample.gpus and sample.idle_s is not None and sample.idle_s >= IDLE_S:
        what = "its GPU is" if sample.gpus == 1 else f"its {sample.gpus} GPUs are"
        text = f"{node.host}: {what} held and idle for {human_duration(sample.idle_s)}"
        alarms.append(Alarm(node.host, "idle GPUs", text))
    if sample.ended_ranks and ranks_are_alive and (sample.ended_s or 0.0) >= ENDED_S:
        ranks = ", ".join(map(str, sample.ended_ranks))
        plural = "ranks" if len(sample.ended_ranks) > 1 else "rank"
        text = f"{node.host}: {plural} {ranks} ended {human_duration(sample.ended_s or 0)} ago, others still run"
        alarms.append(Alarm(node.host, "dead rank", text))
    limit, used = sample.memory_limit_bytes, sample.rss_bytes
    if limit and used is not None and used >= MEMORY_SHARE * limit:
        text = f"{node.host}: memory {human_bytes(int(used))} of {human_bytes(int(limit))}"
        alarms.append(Alarm(node.host, "memory", text))
    return alarms


def _unlike_the_others(nodes: Sequence[NodeSample]) -> list[Alarm]:
    """Find the one node that works while all others wait, or idles while all others work."""
    loads = {node.host: load for node in nodes if (load := node.sample.busy_percent) is not None}
    if len(loads) < 2 or len(loads) != len(nodes):
        return []
    alarms: list[Alarm] = []
    for host, load in loads.items():
        others = [value for name, value in loads.items() if name != host]
        usual = median(others)
        if load >= _BUSY and max(others) <= _APART * load:
            text = f"{host}: busy ({load:.0f} %) while the other nodes wait ({usual:.0f} %): it may be slow"
            alarms.append(Alarm(host, "load", text))
        elif len(loads) > 2 and min(others) >= _WAITING and load <= (1 - _APART) * min(others):
            text = f"{host}: nearly idle ({load:.0f} %) while the other nodes work ({usual:.0f} %)"
            alarms.append(Alarm(host, "load", text))
    return alarms


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
    """Describe a job by its run folder and its scheduler; a removed folder leaves blanks.

    An array of several tasks has no attempts, progress and results of its own: its tasks have.
    """
    first_id, *others = own_ids(entry)
    run_dir = Path(entry.run_dir)
    manifest = read_usable(run_dir / MANIFEST, lambda: read_manifest(run_dir)) or Manifest(job={})
    job = manifest.request
    state = None if others else read_state(entry, first_id)
    folder = output_dir(Path(entry.run_dir), first_id)
    summary = {} if others else read_usable(folder / SUMMARY, lambda: read_summary(folder / SUMMARY)) or {}
    records = statuses([entry])[0].records
    running = not others and any(not record.state.ended for record in records)
    cancelled = any(record.job_id == first_id and record.state is State.CANCELLED for record in records)
    return Description(
        entry=entry,
        records=records,
        attempts=[] if others else read_attempts(task_dir(Path(entry.run_dir), first_id)),
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
