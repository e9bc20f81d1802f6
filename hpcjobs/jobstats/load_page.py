"""Draws the load of a job's nodes over time on one page: GPU, CPU and memory, one line per node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from hpcjobs.errors import ConfigError
from hpcjobs.jobstats.sources import read_request
from hpcjobs.pages import PageTable, Picture, Section, figures, render, save_text
from hpcjobs.record.monitor import Sample
from hpcjobs.run.index import Entry
from hpcjobs.run.progress import NodeSamples
from hpcjobs.site.library import load_site
from hpcjobs.site.partition import describe_nodes
from hpcjobs.units import format_count, human_duration

_TABLE_ROWS = 12
_POINTS = 600
"""Largest number of points of a line: each is the mean of its part of the samples."""


class _Quantity(NamedTuple):
    """The quantity of one picture."""

    name: str
    title: str
    label: str
    caption: str
    value: Callable[[Sample], float | None]


class NodeLoad(NamedTuple):
    """The means and the peak of one node; None: not measured there."""

    host: str
    samples: int
    gpu_percent: float | None
    cpu_percent: float | None
    memory_bytes: float | None
    """The peak."""


_QUANTITIES = (
    _Quantity(
        "gpu",
        "GPU utilisation",
        "GPU utilisation (%)",
        "Per cent of the time in which a kernel ran: mean of the GPUs of the job on the node.",
        lambda s: s.gpu_percent,
    ),
    _Quantity(
        "cpu",
        "CPU utilisation",
        "CPU utilisation (%)",
        "Per cent of the cores that the ranks may use.",
        lambda s: s.cpu_percent,
    ),
    _Quantity(
        "memory",
        "Memory",
        "memory (GiB)",
        "GiB of memory used by the job, without file caches. Dashed line: the memory limit.",
        lambda s: None if s.rss_bytes is None else s.rss_bytes / 2**30,
    ),
)


def measure(nodes: Sequence[NodeSamples]) -> list[NodeLoad]:
    """Means and peaks of each node."""
    return [
        NodeLoad(
            node.host,
            len(node.samples),
            _mean([value for sample in node.samples if (value := sample.gpu_percent) is not None]),
            _mean([value for sample in node.samples if (value := sample.cpu_percent) is not None]),
            max((value for sample in node.samples if (value := sample.rss_bytes) is not None), default=None),
        )
        for node in nodes
    ]


def write(
    title: str, lead: str, nodes: Sequence[NodeSamples], folder: Path, *, facts: Mapping[str, str | None]
) -> list[Path]:
    """Write index.html and the pictures (PNG, SVG) of the measured quantities to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {quantity: figure for quantity in _QUANTITIES if (figure := _draw(quantity, nodes)) is not None}
    every = [sample for node in nodes for sample in node.samples]
    begin = min(node.started_at for node in nodes)
    length = max((node.started_at + sample.time_s for node in nodes for sample in node.samples), default=begin) - begin
    measured = {
        "from": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(begin)),
        "length": human_duration(length),
        "samples": f"{len(every)} of {format_count(len(nodes), 'node')}; a point is the mean of up to"
        f" {max(-(-len(node.samples) // _POINTS) for node in nodes)} samples",
        "source": "monitor of hpcjobs on each node",
    }
    table = PageTable(
        ("node", "samples", "GPU utilisation, mean", "CPU utilisation, mean", "memory, peak"),
        [cells(load) for load in measure(nodes)],
    )
    pictures = [
        Picture(quantity.title, quantity.caption, figures.to_svg(figure), _table_behind(quantity, nodes))
        for quantity, figure in made.items()
    ]
    page = render(
        title=title,
        lead=lead,
        facts={**facts, **measured},
        sections=[Section("Nodes", table=table), Section("Load over time", pictures=pictures)],
    )
    save_text(folder / "index.html", page)
    return [folder / "index.html", *figures.save({one.name: figure for one, figure in made.items()}, folder)]


def facts_of(entry: Entry) -> dict[str, str | None]:
    """Job, site, partition and its nodes."""
    partition = read_request(Path(entry.run_dir)).partition
    try:
        site = load_site(entry.site)
        nodes = describe_nodes(site.partitions[partition]) if partition in site.partitions else None
    except ConfigError:  # the site file was removed: only its name is known
        nodes = None
    return {"job": entry.job_id, "site": entry.site, "partition": partition, "nodes": nodes}


def _table_behind(quantity: _Quantity, nodes: Sequence[NodeSamples]) -> PageTable:
    """Mean per node over each part of the time, in up to twelve parts."""
    begin = nodes[0].started_at
    lines = [(node.host, _points(node, quantity.value, since=begin)) for node in nodes]
    last = max((points[-1][0] for _, points in lines if points), default=0.0)
    bounds = [last * part / _TABLE_ROWS for part in range(_TABLE_ROWS + 1)]
    rows = []
    for low, high in pairwise(bounds):
        means = (
            _mean([value for at, value in points if low <= at < high or at == last == high]) for _, points in lines
        )
        rows.append([f"{low:.1f} to {high:.1f}", *("-" if mean is None else f"{mean:.3g}" for mean in means)])
    note = f"Means of {quantity.label}."
    return PageTable(["minutes", *(host for host, _ in lines)], rows, note)


def cells(load: NodeLoad) -> tuple[str, ...]:
    """The texts of a row about the node."""
    percents = ("-" if value is None else f"{value:.0f} %" for value in (load.gpu_percent, load.cpu_percent))
    memory = "-" if load.memory_bytes is None else f"{load.memory_bytes / 2**30:.2f} GiB"
    return load.host, str(load.samples), *percents, memory


def _draw(quantity: _Quantity, nodes: Sequence[NodeSamples]) -> Figure | None:
    """None: no node measured it."""
    lines = [(node, points) for node in nodes if (points := _points(node, quantity.value, since=nodes[0].started_at))]
    if not lines:
        return None
    figure, axes = figures.new_figure()
    for node, points in lines:
        axes.plot(*zip(*points, strict=True), linewidth=1.2, label=figures.escape_math(node.host))
    limits = {s.memory_limit_bytes for node, _ in lines for s in node.samples if s.memory_limit_bytes}
    if quantity.name == "memory":
        for limit in limits:
            axes.axhline(limit / 2**30, linestyle="--", linewidth=0.8, color=figures.INK)
    else:
        axes.set_ylim(0, 105)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes since the first sample")
    axes.set_ylabel(quantity.label)
    figures.add_legend(figure)
    return figure


def _points(node: NodeSamples, value: Callable[[Sample], float | None], *, since: float) -> list[tuple[float, float]]:
    """Minutes and values, few enough for a picture."""
    known = [
        ((node.started_at + sample.time_s - since) / 60, measured)
        for sample in node.samples
        if (measured := value(sample)) is not None
    ]
    size = -(-len(known) // _POINTS) or 1
    parts = [known[begin : begin + size] for begin in range(0, len(known), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
