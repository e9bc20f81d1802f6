"""Judges nodes and GPUs by their measurements, names the outliers of each metric, and reports and records the result.

The record has one line per verdict, appended, never changed. A bad verdict counts one and is worth half after
`HALF_LIFE_S`; a good one subtracts one, never below zero; a node that is worth `AVOIDED` or more is avoided. So one bad
verdict is forgotten after a half-life, two after twice that, and a check that finds the node well ends it at once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median_high, median_low
from typing import NamedTuple

from hpcjobs.files import AppendStore
from hpcjobs.record.fabric import AllReduce, FabricReport, GpuReport, NodeReport

Z_LIMIT = 3.5
FLOOR = 0.05
TOLERANCE = 0.3


@dataclass(frozen=True)
class Metric:
    """One thing measured on every node: its name in reports, unit, and which direction is good."""

    name: str
    what: str
    unit: str
    scale: float
    more_is_better: bool = True


METRICS = (
    Metric("flops", "computes", "GFLOP/s", 1e9),
    Metric("memory_bytes_per_s", "copies memory", "GB/s", 1e9),
    Metric("network_bytes_per_s", "sends", "GB/s", 1e9),
    Metric("latency_s", "answers", "µs", 1e-6, more_is_better=False),
)


@dataclass
class NodeMeasurements:
    """Measured values of one node by metric, and its failures."""

    host: str
    address: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def keep_best(self, metric: str, rate: float) -> None:
        self.values[metric] = max(self.values.get(metric, 0.0), rate)


@dataclass(frozen=True)
class Judged:
    """A node's verdict: why it is bad (empty: it is good), and how near it is to the others (1: at the median)."""

    node: NodeMeasurements
    reasons: tuple[str, ...]
    score: float

    @property
    def good(self) -> bool:
        return not self.reasons

    @property
    def verdict(self) -> str:
        return GOOD if self.good else BAD


def judge(nodes: list[NodeMeasurements], *, tolerance: float = TOLERANCE) -> list[Judged]:
    """The verdict on each of ``nodes``, in their order."""
    reasons: dict[str, list[str]] = {node.host: list(node.failures) for node in nodes}
    scores: dict[str, float] = {node.host: 0.0 if node.failures else 1.0 for node in nodes}
    for metric in METRICS:
        values = {node.host: node.values[metric.name] for node in nodes if metric.name in node.values}
        for host, (ratio, outlier) in compare(values, metric, tolerance).items():
            scores[host] = min(scores[host], ratio)
            if outlier:
                reasons[host].append(describe(metric, values[host], ratio))
    return [Judged(node, tuple(reasons[node.host]), scores[node.host]) for node in nodes]


def outliers(nodes: list[NodeMeasurements], *names: str, tolerance: float) -> list[str]:
    """The hosts that fall out of the others in one of the metrics ``names``."""
    outliers = []
    for metric in (metric for metric in METRICS if metric.name in names):
        values = {node.host: node.values[metric.name] for node in nodes if metric.name in node.values}
        outliers += [host for host, (_, outlier) in compare(values, metric, tolerance).items() if outlier]
    return outliers


def compare(values: Mapping[str, float], metric: Metric, tolerance: float) -> dict[str, tuple[float, bool]]:
    """Compare each host with the median (1: alike, below: worse), and whether it is an outlier."""
    if len(values) < 2:
        return {}
    # as rates, so that for every metric more is better and twice the time is half the rate
    rates = {host: value if metric.more_is_better else 1 / value for host, value in values.items()}
    middle = median_high(rates.values())
    spread = max(median_low([abs(rate - middle) for rate in rates.values()]), FLOOR * middle)
    return {
        host: (rate / middle, 0.6745 * (middle - rate) / spread > Z_LIMIT and rate < (1 - tolerance) * middle)
        for host, rate in rates.items()
    }


def describe(metric: Metric, value: float, ratio: float) -> str:
    others = value / ratio if metric.more_is_better else value * ratio
    verb = metric.what + (" at" if metric.more_is_better else " in")
    return f"{verb} {format_value(value, metric.scale)} {metric.unit}, the others {format_value(others, metric.scale)}"


def format_value(value: float, scale: float) -> str:
    """Three digits; thousands in full: ``12,346`` and not ``1.23e+04``."""
    scaled = value / scale
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


def best(judged: list[Judged], count: int, *, keep: str | None = None) -> list[str]:
    """The ``count`` best hosts, in the order of the allocation; fewer, if fewer are good.

    ``keep`` is one that must be among them: if it is bad, none is chosen.
    """
    good = sorted((each for each in judged if each.good), key=lambda each: (each.node.host != keep, -each.score))
    chosen = {each.node.host for each in good[:count]}
    return [each.node.host for each in judged if each.node.host in chosen and (keep is None or keep in chosen)]


GPU_METRICS = (
    Metric("flops", "computes", "TFLOP/s", 1e12),
    Metric("memory_bytes_per_s", "copies its memory", "GB/s", 1e9),
    Metric("peer_bytes_per_s", "copies to its best neighbour", "GB/s", 1e9),
)


def judge_gpus(gpus: Sequence[GpuReport], *, tolerance: float) -> dict[str, list[str]]:
    """Faults by host: wrong results first, then rates that differ from other GPUs of the same model."""
    problems: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.wrong is not None:
            problems.setdefault(gpu.host, []).append(f"{gpu.title} {gpu.wrong}")
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.name == name and gpu.wrong is None]
        for metric in GPU_METRICS:
            by_place = {f"{gpu.host} {gpu.index}": gpu for gpu in alike if metric.name in gpu.values}
            values = {place: gpu.values[metric.name] for place, gpu in by_place.items()}
            for place, (ratio, outlier) in compare(values, metric, tolerance).items():
                if outlier:
                    gpu = by_place[place]
                    text = f"{gpu.title} {describe(metric, values[place], ratio)}"
                    problems.setdefault(gpu.host, []).append(text)
    return problems


@dataclass
class Findings:
    """All that one check found."""

    nodes: list[NodeMeasurements]
    gpus: list[GpuReport] = field(default_factory=list)
    allreduce: dict[str, AllReduce] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def report(
    findings: Findings, judged: Sequence[Judged], chosen: Sequence[str] | None, *, took_s: float
) -> FabricReport:
    """``fabric.json``: rates in units a second, times in seconds."""
    return FabricReport(
        schema=1,
        time=time.time(),
        took_s=took_s,
        job_id=os.environ.get("HPCJOBS_JOB_ID"),
        nodes=tuple(
            NodeReport(each.node.host, each.verdict, each.reasons, each.score, each.node.address, **each.node.values)
            for each in judged
        ),
        chosen=None if chosen is None else tuple(chosen),
        allreduce=findings.allreduce,
        notes=tuple(findings.notes),
        gpus=tuple(findings.gpus),
    )


def table(judged: Sequence[Judged]) -> Iterator[str]:
    """A line per node."""
    verdicts = ["good" if each.good else "BAD: " + "; ".join(each.reasons) for each in judged]
    rows = [(each.node.host, each.node.values, verdict) for each, verdict in zip(judged, verdicts, strict=True)]
    yield from _format_rows(("node", "verdict"), METRICS, rows)


def gpu_table(gpus: Sequence[GpuReport]) -> Iterator[str]:
    """A line per GPU."""
    if gpus:
        rows = [(f"{gpu.host} {gpu.title}", gpu.values, gpu.name) for gpu in gpus]
        yield from _format_rows(("GPU", "model"), GPU_METRICS, rows)


def _format_rows(
    ends: tuple[str, str], metrics: Sequence[Metric], rows: Sequence[tuple[str, Mapping[str, float], str]]
) -> Iterator[str]:
    """Two lines of headings, and a line per row: its name, values and last column."""
    wide = max(len(name) for name in (ends[0], *(name for name, _, _ in rows)))
    yield "  ".join([f"{ends[0]:{wide}}", *(f"{metric.unit:>8}" for metric in metrics), ends[1]])
    yield "  ".join([" " * wide, *(f"{metric.name.partition('_')[0]:>8}" for metric in metrics)]).rstrip()
    for name, values, last in rows:
        cells = [_cell(values.get(metric.name), metric.scale) for metric in metrics]
        yield "  ".join([f"{name:{wide}}", *(f"{cell:>8}" for cell in cells), last])


def _cell(value: float | None, scale: float) -> str:
    return "-" if value is None else format_value(value, scale)


def collectives(findings: Findings) -> Iterator[str]:
    """All-reduce by size: microseconds, one column for each that was measured."""
    if not findings.allreduce:
        return
    by_size = {over: {point.bytes: point.seconds for point in points} for over, points in findings.allreduce.items()}
    yield "all-reduce, µs   " + "".join(f"{over:>14}" for over in by_size)
    for size in sorted(set(chain.from_iterable(by_size.values()))):
        cells = [_cell(times.get(size), 1e-6) for times in by_size.values()]
        yield f"{size:>11,} bytes" + "".join(f"{cell:>14}" for cell in cells)


def remember(path: Path, judged: Sequence[Judged]) -> str | None:
    """Append the verdicts to the site's record; in words why that could not be."""
    now, job = time.time(), os.environ.get("HPCJOBS_JOB_ID")
    verdicts = [NodeVerdict(each.node.host, each.verdict, now, "; ".join(each.reasons)[:500], job) for each in judged]
    try:
        append(path, verdicts)
    except OSError as error:
        return f"the record of nodes {path} cannot be written from here: {error.strerror}"
    return None


HALF_LIFE_S = 2 * 86400.0
AVOIDED = 0.5
GOOD, BAD, CLEARED = "good", "bad", "cleared"


class NodeVerdict(NamedTuple):
    """On one node, at one time (seconds since 1970)."""

    node: str
    verdict: str
    time: float
    reason: str = ""
    job_id: str | None = None


class Standing(NamedTuple):
    """State of one node: its last verdict, its weight, and until when it is avoided (None: it is not)."""

    last: NodeVerdict
    worth: float
    avoided_until: float | None


def record_path(site: str) -> Path:
    """``$XDG_STATE_HOME/hpcjobs/nodes/SITE``, the folder of a store."""
    return AppendStore("nodes", site).folder


def append(path: Path, verdicts: Iterable[NodeVerdict]) -> None:
    """Add ``verdicts`` to the record."""
    AppendStore(str(path)).append(json.dumps(verdict._asdict()) for verdict in verdicts)


def read(path: Path) -> list[NodeVerdict]:
    """All verdicts, oldest first; empty without a readable record. A line that a full disk cut off is skipped."""
    parsed = [_parse_line(line.text) for line in AppendStore(str(path)).read(lambda error: None)]
    return sorted((verdict for verdict in parsed if verdict is not None), key=lambda verdict: verdict.time)


def _parse_line(line: bytes) -> NodeVerdict | None:
    try:
        return NodeVerdict(**json.loads(line))
    except (ValueError, TypeError):
        return None


def standings(verdicts: Iterable[NodeVerdict], now: float) -> dict[str, Standing]:
    """The standing of every node of the record at ``now``."""
    worth: dict[str, float] = {}
    last: dict[str, NodeVerdict] = {}
    for verdict in verdicts:
        before = _decay(worth[verdict.node], verdict.time - last[verdict.node].time) if verdict.node in last else 0.0
        change = {BAD: before + 1, GOOD: max(0.0, before - 1)}
        worth[verdict.node], last[verdict.node] = change.get(verdict.verdict, 0.0), verdict
    return {node: _standing(last[node], worth[node], now) for node in last}


def _decay(worth: float, seconds: float) -> float:
    return float(worth * 0.5 ** (max(0.0, seconds) / HALF_LIFE_S))


def _standing(last: NodeVerdict, worth: float, now: float) -> Standing:
    until = last.time + HALF_LIFE_S * math.log2(worth / AVOIDED) if worth > 0 else 0.0
    return Standing(last, _decay(worth, now - last.time), until if until > now else None)


def find_avoided(path: Path, now: float) -> dict[str, Standing]:
    """The nodes to leave out of a job that is submitted at ``now``."""
    current = standings(read(path), now)
    return {node: standing for node, standing in sorted(current.items()) if standing.avoided_until is not None}
