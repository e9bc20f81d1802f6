"""Judges each GPU by its measurements: a slow or wrong one is named by host, index and bus id.

GPUs are compared with others of the same name over all nodes, as nodes are with each other (`verdict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcjobs.fabric.verdict import Metric, compare, describe

METRICS = (
    Metric("flops", "computes", "TFLOP/s", 1e12),
    Metric("memory_bytes_per_s", "copies its memory", "GB/s", 1e9),
    Metric("peer_bytes_per_s", "copies to its best neighbour", "GB/s", 1e9),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU as its process measured it. `peers`: bytes a second to the other GPUs of the node, by index."""

    host: str
    index: int
    bus_id: str | None
    name: str
    flops: float
    memory_bytes_per_s: float
    wrong: str | None = None
    """What came out wrong."""
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"GPU {self.index}" + (f" ({self.bus_id})" if self.bus_id else "")

    @property
    def values(self) -> dict[str, float]:
        """The values by metric. A link counts by its better end: the other one is then at fault."""
        values = {"flops": self.flops, "memory_bytes_per_s": self.memory_bytes_per_s}
        return values | ({"peer_bytes_per_s": max(self.peers.values())} if self.peers else {})


def parse_gpus(document: Mapping[str, Any]) -> list[Gpu]:
    return [Gpu(**fields) for fields in document["gpus"]]


def judge_gpus(gpus: Sequence[Gpu], *, tolerance: float) -> dict[str, list[str]]:
    """What is wrong, by host: results first, then rates that fall out of those of the same model."""
    problems: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.wrong is not None:
            problems.setdefault(gpu.host, []).append(f"{gpu.title} {gpu.wrong}")
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.name == name and gpu.wrong is None]
        for metric in METRICS:
            by_place = {f"{gpu.host} {gpu.index}": gpu for gpu in alike if metric.name in gpu.values}
            values = {place: gpu.values[metric.name] for place, gpu in by_place.items()}
            for place, (ratio, outlier) in compare(values, metric, tolerance).items():
                if outlier:
                    gpu = by_place[place]
                    text = f"{gpu.title} {describe(metric, values[place], ratio)}"
                    problems.setdefault(gpu.host, []).append(text)
    return problems
