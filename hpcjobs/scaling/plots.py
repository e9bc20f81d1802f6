"""Pictures of a study: figures of matplotlib, drawn without a display."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, PercentFormatter

from hpcjobs.pages.figures import COLOURS, GREY, INK, add_legend, choose_labels, escape_math, new_figure
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scaling.analysis import Analysis
from hpcjobs.scaling.fits import Interval

_SLOW: Final = 0.95
"""A host is marked if its fastest run is slower than this share of the median host's fastest run."""
_MOST_HOSTS: Final = 48
_UNKNOWN: Final = "not known"
_HOST_COLOURS: Final = {False: COLOURS[0], True: COLOURS[1]}


class HostRuns(NamedTuple):
    """The runs that used a host: throughput over the median of their size."""

    host: str
    relative: tuple[float, ...]
    slow: bool


def host_spread(runs: pl.DataFrame, *, per: str) -> list[HostRuns]:
    """The hosts of a study, slowest first.

    A run is as slow as its slowest host. So a host is judged by its fastest run: a healthy one has been in some run
    without the slow one.
    """
    sound = runs.filter(pl.col("throughput").is_finite() & (pl.col("throughput") > 0)).with_columns(
        relative=pl.col("throughput") / pl.col("throughput").median().over(per, "nodes")
    )
    of_host: dict[str, list[float]] = {}
    for node_list, relative in sound.select("node_list", "relative").rows():
        for host in hosts_of(node_list) if node_list else [_UNKNOWN]:
            of_host.setdefault(host, []).append(relative)
    fastest = pl.Series([max(values) for values in of_host.values()], dtype=pl.Float64).median()
    bound = _SLOW * fastest if isinstance(fastest, float) else 0.0
    spread = [HostRuns(host, tuple(values), max(values) < bound) for host, values in of_host.items()]
    return sorted(spread, key=lambda one: (max(one.relative), _by_number(one.host)))


def _by_number(host: str) -> list[tuple[int, str]]:
    """Sort key: ``n2`` comes before ``n10``."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", host)]


def draw_hosts(hosts: Sequence[HostRuns]) -> Figure:
    """One row per host, the slowest at the top; of many hosts the slowest."""
    shown = hosts[:_MOST_HOSTS]
    figure, axes = new_figure(height=max(2.4, 1.2 + 0.2 * len(shown)))
    for row, one in enumerate(shown):
        axes.plot(one.relative, [row] * len(one.relative), "o", color=_HOST_COLOURS[one.slow], alpha=0.7)
    axes.axvline(1, linestyle=":", color=GREY)
    names = [escape_math(one.host) + (" (slow)" if one.slow else "") for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=9)
    for label, one in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_color(_HOST_COLOURS[True] if one.slow else INK)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    few = f" (slowest {len(shown)} of {len(hosts)} hosts)" if len(shown) < len(hosts) else ""
    axes.set_xlabel(f"throughput of a run / median of its size{few}")
    return figure


_COLOURS: Final = {"measured": COLOURS[0], "ideal": GREY, "fit": COLOURS[1:5]}
_PARTS: Final = {
    "compute": COLOURS[0],
    "communication": COLOURS[1],
    "data_wait": COLOURS[4],
    "checkpoint": GREY,
}


def figures(analysis: Analysis, runs: pl.DataFrame) -> dict[str, Figure]:
    """Picture name -> figure: ``speedup``, ``efficiency``, ``breakdown`` (where steps were measured), ``spread``."""
    made = {"speedup": _figure(_speedup, analysis), "efficiency": _figure(_efficiency, analysis)}
    if any(group.compute is not None for group in analysis.groups):
        made["breakdown"] = _figure(_breakdown, analysis)
    made["spread"] = draw_hosts(host_spread(runs, per=analysis.per))
    return made


def _figure(draw: Callable[[Axes, Analysis], None], analysis: Analysis) -> Figure:
    figure, axes = new_figure()
    draw(axes, analysis)
    add_legend(figure)
    return figure


def _size_axis(axes: Axes, analysis: Analysis) -> None:
    """Sizes on a logarithmic axis: they are mostly doubled, and every one of 1 to 64 has room for its label."""
    n = sorted({group.n for group in analysis.groups})
    axes.set_xscale("log", base=2)
    labelled = [n[index] for index in choose_labels([math.log2(value) for value in n])]
    axes.set_xticks(n, [str(value) if value in labelled else "" for value in n])
    axes.minorticks_off()
    axes.set_xlabel(analysis.per)


def error_lengths(values: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above; 0 without an interval."""
    return [
        [0.0 if v.low is None else max(0.0, v.value - v.low) for v in values],
        [0.0 if v.high is None else max(0.0, v.high - v.value) for v in values],
    ]


def _curves(axes: Axes, analysis: Analysis, *, per_unit: bool) -> None:
    base, largest = analysis.groups[0].n, analysis.groups[-1].n
    where = np.geomspace(base, largest, 100)
    for fitted, colour in zip(analysis.fits, _COLOURS["fit"], strict=False):
        curve = [fitted.speedup(n, base) * (base / n if per_unit else 1) for n in where]
        is_excluded = analysis.can_exclude and fitted not in analysis.possible
        label = f"{fitted.law.name} (excluded)" if is_excluded else fitted.law.name
        axes.plot(where, curve, "--" if is_excluded else "-", color=colour, label=label)


def _speedup(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.speedup for group in analysis.groups]
    axes.plot(n, [v / n[0] for v in n], ":", color=_COLOURS["ideal"], label="ideal")
    axes.set_yscale("log", base=2)
    _curves(axes, analysis, per_unit=False)
    axes.errorbar(n, [v.value for v in values], yerr=error_lengths(values), fmt="o", capsize=3,
                  color=_COLOURS["measured"], label="measured, 95 % interval", zorder=3)  # fmt: skip
    _size_axis(axes, analysis)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], min(v.value for v in values) / 2))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_ylabel(f"speed-up relative to {n[0]} {analysis.per[:-1] if n[0] == 1 else analysis.per}")


def _efficiency(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.efficiency for group in analysis.groups]
    axes.axhline(1, linestyle=":", color=_COLOURS["ideal"], label="ideal")
    axes.axhline(analysis.knee.target, linestyle="-.", linewidth=1, color=_COLOURS["ideal"],
                 label=f"target {analysis.knee.target:.0%}")  # fmt: skip
    _curves(axes, analysis, per_unit=True)
    axes.errorbar(n, [v.value for v in values], yerr=error_lengths(values), fmt="o", capsize=3,
                  color=_COLOURS["measured"], label="measured, 95 % interval", zorder=3)  # fmt: skip
    _size_axis(axes, analysis)
    axes.set_ylim(0, max(1.1, *(v.value * 1.1 for v in values)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("efficiency")


def _breakdown(axes: Axes, analysis: Analysis) -> None:
    groups = [group for group in analysis.groups if group.compute is not None]
    bottom = np.zeros(len(groups))
    where = np.arange(len(groups))
    for part, colour in _PARTS.items():
        shares = [getattr(group, part) for group in groups]
        if all(share is None for share in shares):
            continue
        heights = np.array([1e3 * (group.step_s or 0) * (s or 0) for group, s in zip(groups, shares, strict=True)])
        axes.bar(where, heights, 0.6, bottom=bottom, color=colour, label=part.replace("_", " "))
        bottom += heights
    labelled = set(choose_labels([float(index) for index in where]))
    axes.set_xticks(where, [str(group.n) if index in labelled else "" for index, group in enumerate(groups)])
    axes.set_xlabel(analysis.per)
    axes.set_ylabel("milliseconds per step")
