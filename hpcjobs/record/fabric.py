"""``fabric.json``: the result of a check of nodes, written by the job of ``hpcjobs fabric``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpcjobs.files import write_beside
from hpcjobs.record.values import encode, read_json

FABRIC = "fabric.json"


class NodeReport(NamedTuple):
    """One node: verdict, reasons and measurements (None: not measured). Rates are per second, times seconds."""

    host: str
    verdict: str
    reasons: tuple[str, ...]
    score: float
    """The worst of its values against the median of all nodes: 1 is alike, 0.5 half as fast."""
    address: str | None = None
    flops: float | None = None
    memory_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class GpuReport:
    """One GPU; rates are per second. `peers`: bytes to the other GPUs of its node, by index."""

    host: str
    index: int
    bus_id: str | None
    name: str
    flops: float
    memory_bytes_per_s: float
    wrong: str | None = None
    """The wrong result, if there was one."""
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"GPU {self.index}" + (f" ({self.bus_id})" if self.bus_id else "")

    @property
    def values(self) -> dict[str, float]:
        """The values by metric. A link counts by its better end: the other one is then at fault."""
        values = {"flops": self.flops, "memory_bytes_per_s": self.memory_bytes_per_s}
        return values | ({"peer_bytes_per_s": max(self.peers.values())} if self.peers else {})


class FabricPoint(NamedTuple):
    """One all-reduce: its size, and seconds on the slowest rank."""

    bytes: int
    seconds: float


AllReduce = tuple[FabricPoint, ...]


class FabricReport(NamedTuple):
    """``fabric.json`` of a run folder."""

    schema: int
    time: float
    """Seconds since 1970."""
    took_s: float
    job_id: str | None
    nodes: tuple[NodeReport, ...]
    chosen: tuple[str, ...] | None
    allreduce: dict[str, AllReduce]
    notes: tuple[str, ...]
    gpus: tuple[GpuReport, ...] = ()

    def write(self, run_dir: Path) -> None:
        write_beside(run_dir / FABRIC, encode(self), mode=None)

    @classmethod
    def read(cls, run_dir: Path) -> FabricReport:
        """Read the report of a run folder. Raises OSError, and ValueError where the file holds another value."""
        return read_json(run_dir / FABRIC, cls)
