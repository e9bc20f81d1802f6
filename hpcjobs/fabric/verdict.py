"""Judges nodes and GPUs by their measurements, and names the outliers of each metric.

A value is an outlier if its robust z-score, 0.6745 times the distance from the median in median absolute deviations
(Iglewicz and Hoaglin, 1993), passes 3.5, and if it is also worse than the median by more than the tolerance. Few
nodes, or nodes that are very similar, have a deviation near zero: it is taken as 5 % of the median at
least. With an even number the better middle counts as the median, so the slower one of two nodes is the outlier.
GPUs are compared with others of the same name over all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high, median_low

from hpcjobs.record.fabric import GpuReport

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
