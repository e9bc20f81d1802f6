"""Reports the result of a check: as a file, as a table, and in the record of nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from hpcjobs.fabric import node_record
from hpcjobs.fabric.verdict import GPU_METRICS, METRICS, Judged, NodeMeasurements, format_value
from hpcjobs.record.fabric import AllReduce, FabricReport, GpuReport, NodeReport


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
            NodeReport(
                each.node.host,
                node_record.GOOD if each.good else node_record.BAD,
                each.reasons,
                each.score,
                each.node.address,
                **each.node.values,
            )
            for each in judged
        ),
        chosen=None if chosen is None else tuple(chosen),
        allreduce=findings.allreduce,
        notes=tuple(findings.notes),
        gpus=tuple(findings.gpus),
    )


def table(judged: Sequence[Judged]) -> Iterator[str]:
    """A line per node."""
    wide = max(len("node"), *(len(each.node.host) for each in judged))
    yield "  ".join([f"{'node':{wide}}", *(f"{metric.unit:>8}" for metric in METRICS), "verdict"])
    yield "  ".join([" " * wide, *(f"{_heading(metric.name):>8}" for metric in METRICS)]).rstrip()
    for each in judged:
        cells = [_cell(each.node.values.get(metric.name), metric.scale) for metric in METRICS]
        verdict = "good" if each.good else "BAD: " + "; ".join(each.reasons)
        yield "  ".join([f"{each.node.host:{wide}}", *(f"{cell:>8}" for cell in cells), verdict])


def gpu_table(gpus: Sequence[GpuReport]) -> Iterator[str]:
    """A line per GPU."""
    if not gpus:
        return
    wide = max(len(f"{gpu.host} {gpu.title}") for gpu in gpus)
    yield "  ".join([f"{'GPU':{wide}}", *(f"{metric.unit:>8}" for metric in GPU_METRICS), "model"])
    yield "  ".join([" " * wide, *(f"{_heading(metric.name):>8}" for metric in GPU_METRICS)]).rstrip()
    for gpu in gpus:
        cells = [_cell(gpu.values.get(metric.name), metric.scale) for metric in GPU_METRICS]
        yield "  ".join([f"{gpu.host + ' ' + gpu.title:{wide}}", *(f"{cell:>8}" for cell in cells), gpu.name])


def _heading(name: str) -> str:
    return name.partition("_")[0]


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
    verdicts = [
        node_record.NodeVerdict(
            each.node.host, node_record.GOOD if each.good else node_record.BAD, now, "; ".join(each.reasons)[:500], job
        )
        for each in judged
    ]
    try:
        node_record.append(path, verdicts)
    except OSError as error:
        return f"the record of nodes {path} cannot be written from here: {error.strerror}"
    return None
