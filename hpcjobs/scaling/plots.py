"""Pictures of a study: figures of matplotlib, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, PercentFormatter

from hpcjobs.pages.figures import choose_labels, new_figure
from hpcjobs.scaling.analysis import Analysis
from hpcjobs.scaling.host_spread import draw_hosts, host_spread
from hpcjobs.scaling.intervals import Interval

_COLOURS: Final = {"measured": "#1f5fa8", "ideal": "#8a8f98", "fit": ("#c2571a", "#2c7a4b", "#7a3fa0", "#b08900")}
_PARTS: Final = {
    "compute": "#1f5fa8",
    "communication": "#c2571a",
    "data_wait": "#d9a514",
    "checkpoint": "#8a8f98",
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
    return figure


def _size_axis(axes: Axes, analysis: Analysis) -> None:
    """Sizes on a logarithmic axis: they are mostly doubled, and every one of 1 to 64 has room for its label."""
    n = sorted({group.n for group in analysis.groups})
    axes.set_xscale("log", base=2)
    labelled = [n[index] for index in choose_labels([math.log2(value) for value in n])]
    axes.set_xticks(n, [str(value) if value in labelled else "" for value in n])
    axes.minorticks_off()
    axes.set_xlabel(analysis.per)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above; nothing where there is no interval."""
    return [
        [0.0 if v.low is None else max(0.0, v.value - v.low) for v in values],
        [0.0 if v.high is None else max(0.0, v.high - v.value) for v in values],
    ]


def _curves(axes: Axes, analysis: Analysis, *, per_unit: bool) -> None:
    base, largest = analysis.groups[0].n, analysis.groups[-1].n
    where = np.geomspace(base, largest, 100)
    for fitted, colour in zip(analysis.fits, _COLOURS["fit"], strict=False):
        curve = [fitted.speedup(n, base) * (base / n if per_unit else 1) for n in where]
        is_excluded = bool(analysis.possible) and fitted not in analysis.possible
        label = f"{fitted.law.name} (excluded)" if is_excluded else fitted.law.name
        axes.plot(where, curve, "--" if is_excluded else "-", color=colour, label=label)


def _speedup(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.speedup for group in analysis.groups]
    axes.plot(n, [v / n[0] for v in n], ":", color=_COLOURS["ideal"], label="ideal")
    axes.set_yscale("log", base=2)
    _curves(axes, analysis, per_unit=False)
    axes.errorbar(n, [v.value for v in values], yerr=_bars(values), fmt="o", capsize=3, color=_COLOURS["measured"],
                  label="measured, 95 % interval", zorder=3)  # fmt: skip
    _size_axis(axes, analysis)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], min(v.value for v in values) / 2))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_ylabel(f"speed-up relative to {n[0]} {analysis.per[:-1] if n[0] == 1 else analysis.per}")
    axes.legend(frameon=False)


def _efficiency(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.efficiency for group in analysis.groups]
    axes.axhline(1, linestyle=":", color=_COLOURS["ideal"], label="ideal")
    axes.axhline(analysis.knee.target, linestyle="-.", linewidth=1, color=_COLOURS["ideal"],
                 label=f"target {analysis.knee.target:.0%}")  # fmt: skip
    _curves(axes, analysis, per_unit=True)
    axes.errorbar(n, [v.value for v in values], yerr=_bars(values), fmt="o", capsize=3, color=_COLOURS["measured"],
                  label="measured, 95 % interval", zorder=3)  # fmt: skip
    _size_axis(axes, analysis)
    axes.set_ylim(0, max(1.1, *(v.value * 1.1 for v in values)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False)


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
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
