"""Draws the load of a job's nodes over time on one page: GPU, CPU and memory, one line per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from hpcjobs.pages import figures, render
from hpcjobs.pages.save import save_text
from hpcjobs.record.monitor import Sample
from hpcjobs.run.progress import NodeSamples

_POINTS = 600
"""Largest number of points of a line: each is the mean of its part of the samples."""


class _Quantity(NamedTuple):
    """The quantity of one picture."""

    name: str
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
        "GPU utilisation (%)",
        "Mean of the GPUs of the job on the node.",
        lambda s: s.gpu_percent,
    ),
    _Quantity("cpu", "CPU utilisation (%)", "Of the cores that the ranks may use.", lambda s: s.cpu_percent),
    _Quantity(
        "memory",
        "memory (GiB)",
        "Memory used by the job, without file caches. Dashed line: the memory limit.",
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


def write(title: str, lead: str, nodes: Sequence[NodeSamples], folder: Path) -> list[Path]:
    """Write index.html and the pictures (PNG, SVG) of the measured quantities to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {quantity.name: figure for quantity in _QUANTITIES if (figure := _draw(quantity, nodes)) is not None}
    captions = {quantity.name: quantity.caption for quantity in _QUANTITIES}
    page = render(
        "load",
        title=title,
        lead=lead,
        warnings=[],
        pictures=[(captions[name], figures.to_svg(figure)) for name, figure in made.items()],
        rows=[cells(load) for load in measure(nodes)],
    )
    save_text(folder / "index.html", page)
    return [folder / "index.html", *figures.save(made, folder)]


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
            axes.axhline(limit / 2**30, linestyle="--", linewidth=0.8, color="0.4")
    else:
        axes.set_ylim(0, 105)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes since the first sample")
    axes.set_ylabel(quantity.label)
    if len(lines) > 1:
        axes.legend(fontsize="small", ncols=1 + len(lines) // 12)
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
