"""Reads the load of a job's nodes that the samplers of trainers and of `hpcjobs monitor` wrote to monitor.jsonl."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.run.folder import output_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.json_lines import decode_line, first_line, last_lines
from hpcjobs.run.log_file import Tail
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import Connect
from hpcjobs.run.wait import Watch
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.outage import Report, discard
from hpcjobs.units import human_bytes

_POLL_S = 0.5
_CLOCKS_DIFFER_S = 2.0
"""The clock of a node and that of the scheduler may differ by so much."""


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
    memory_source: str | None = None
    """``cgroup``, ``pss`` (shared pages once) or ``rss`` (once for each process): what `rss_bytes` counts."""
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
        counted = " (RSS, shared memory counted for each process)" if self.memory_source == "rss" else ""
        return human_bytes(int(used_bytes)) + limit + counted


class NodeSample(msgspec.Struct, frozen=True):
    """The newest sample of a node, and when it was taken (seconds since 1970, by the node's clock)."""

    host: str
    taken: float
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


class _End(msgspec.Struct, frozen=True):
    """The last line of monitor.jsonl, once its sampler has ended."""


class _Head(msgspec.Struct, frozen=True):
    """The first line of monitor.jsonl."""

    host: str
    started_at: float
    interval_s: float = 0.0


def newest_samples(run_dir: Path) -> list[NodeSample]:
    """The last sample of each node, in the order of nodes; empty without --monitor."""
    return [sample for path in monitor_files(run_dir) if (sample := _newest_sample(path)) is not None]


def current_samples(nodes: Iterable[NodeSample], record: JobRecord) -> list[NodeSample]:
    """The newest sample of each host that the job has now; files of an attempt before it may name others.

    Where no sample is of a host that the scheduler names, it counts hosts by other names than they have themselves.
    """
    own = [node for node in nodes if record.started is None or node.taken >= record.started - _CLOCKS_DIFFER_S]
    newest = {node.host: node for node in sorted(own, key=lambda node: node.taken)}
    hosts = {_short(host) for host in hosts_of(record.node_list or "")}
    listed = {host for host in newest if _short(host) in hosts} or set(newest)
    return [node for node in own if node.host in listed and newest[node.host] is node]


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def all_samples(run_dir: Path) -> list[NodeSamples]:
    """Every sample of each node, in the order of nodes."""
    nodes = []
    for path in monitor_files(run_dir):
        head, lines = _head(path), Tail(path).news(last=True)
        read = tuple(s for line in lines if (s := decode_line(line.encode(), Sample, kind="sample")) is not None)
        if head is not None and read:
            nodes.append(NodeSamples(head.host, head.started_at, read))
    return nodes


def open_samplers(run_dir: Path) -> list[OpenSampler]:
    """The samplers that have taken a sample and have not written their end."""
    return [
        OpenSampler(newest, head.interval_s)
        for path in monitor_files(run_dir)
        if (head := _head(path)) is not None
        and (newest := _newest_sample(path)) is not None
        and not any(decode_line(line, _End, kind="end") is not None for line in last_lines(path)[-1:])
    ]


def monitor_files(run_dir: Path) -> list[Path]:
    """monitor.jsonl of the first node, then those of the others by number."""
    number = {path: int(path.stem.partition("-")[2] or 0) for path in run_dir.glob("monitor*.jsonl") if _is_ours(path)}
    return sorted(number, key=lambda path: number[path])


def _is_ours(path: Path) -> bool:
    return path.stem == "monitor" or path.stem.removeprefix("monitor-").isdecimal()


def _newest_sample(path: Path) -> NodeSample | None:
    head = _head(path)
    lines = (decode_line(line, Sample, kind="sample") for line in reversed(last_lines(path)))
    sample = next((sample for sample in lines if sample is not None), None)
    return None if head is None or sample is None else NodeSample(head.host, head.started_at + sample.time_s, sample)


def _head(path: Path) -> _Head | None:
    return decode_line(first_line(path), _Head, kind="monitor")


def samples(entry: Entry) -> Iterator[str]:
    """Every sample so far, a line each, the nodes one after the other."""
    for path in all_monitor_files(entry):
        yield from _select_lines(path, Tail(path).news(last=True))


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
            yield from _select_lines(path, tails.setdefault(path, Tail(path)).news(last=over))
        if over:
            return
        pause(_POLL_S)


def all_monitor_files(entry: Entry) -> list[Path]:
    """Those of the entry's job, or of all tasks of its array."""
    folders = [output_dir(Path(entry.run_dir), job_id) for job_id in own_ids(entry)]
    return [path for folder in folders for path in monitor_files(folder)]


def _select_lines(path: Path, lines: Iterable[str]) -> Iterator[str]:
    head = _head(path)
    for line in lines:
        sample = decode_line(line.encode(), Sample, kind="sample")
        if head is not None and sample is not None:
            taken = time.strftime("%H:%M:%S", time.localtime(head.started_at + sample.time_s))
            yield f"{head.host}  {taken}  {sample}\n"
