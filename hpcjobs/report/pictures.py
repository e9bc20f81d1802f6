"""Pictures of a study, as figures of matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcjobs.report.fits import Interval
from hpcjobs.report.scaling import Analysis

mpl.rcParams["svg.fonttype"] = "none"  # words stay words: smaller files, and a page can be searched
mpl.rcParams["svg.hashsalt"] = "hpcjobs"  # the same study gives the same file
_COLOURS: Final = {"measured": "#1f5fa8", "ideal": "#8a8f98", "fit": ("#c2571a", "#2c7a4b"), "node": "#6b4fa0"}
_NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_PARTS: Final = {
    "compute": "#1f5fa8",
    "communication": "#c2571a",
    "data_wait": "#d9a514",
    "checkpoint": "#8a8f98",
}


def figures(found: Analysis, runs: pl.DataFrame) -> dict[str, Figure]:
    """Picture name -> figure: ``speedup``, ``efficiency``, ``breakdown`` (where steps were measured), ``spread``."""
    made = {"speedup": _figure(_speedup, found), "efficiency": _figure(_efficiency, found)}
    if any(group.compute is not None for group in found.groups):
        made["breakdown"] = _figure(_breakdown, found)
    made["spread"] = _figure(lambda axes, told: _spread(axes, told, runs), found)
    return made


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(made: dict[str, Figure], folder: Path) -> list[Path]:
    """NAME.png and NAME.svg of each."""
    written = []
    for name, figure in made.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=150, metadata=_NO_METADATA if kind == "svg" else None)
            written.append(path)
    return written


def _figure(draw: Callable[[Axes, Analysis], None], found: Analysis) -> Figure:
    figure, axes = blank()
    draw(axes, found)
    return figure


def blank(*, width: float = 6.4) -> tuple[Figure, Axes]:
    """A figure of our size and style with nothing in it; ``width`` in inches."""
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    return figure, axes


def _sizes(axes: Axes, found: Analysis, *, log: bool) -> None:
    n = [group.n for group in found.groups]
    if log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(n, [str(value) for value in n])
    axes.minorticks_off()
    axes.set_xlabel(found.per)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above; nothing where there is no interval."""
    low = [max(0.0, v.value - v.low) if v.low == v.low else 0.0 for v in values]
    return [low, [max(0.0, v.high - v.value) if v.high == v.high else 0.0 for v in values]]


def _curves(axes: Axes, found: Analysis, *, per_unit: bool) -> None:
    base, largest = found.groups[0].n, found.groups[-1].n
    where = np.linspace(base, largest, 200)
    for fitted, colour in zip(found.fits, _COLOURS["fit"], strict=False):
        divisor = where / base if per_unit else np.ones_like(where)
        drawn = fitted.law.predict(where, fitted.draws)
        drawn = drawn / drawn[:, :1] / divisor
        best = fitted.law.predict(where, fitted.best[None, :])[0]
        style = "-" if fitted is found.believed else "--"
        axes.plot(where, best / best[0] / divisor, style, color=colour, label=fitted.law.name, zorder=2)
        if fitted is found.believed and not np.isnan(drawn).any():
            low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
            axes.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)


def _speedup(axes: Axes, found: Analysis) -> None:
    n = [group.n for group in found.groups]
    values = [group.speedup for group in found.groups]
    axes.plot(n, [v / n[0] for v in n], ":", color=_COLOURS["ideal"], label="ideal")
    _curves(axes, found, per_unit=False)
    axes.errorbar(n, [v.value for v in values], yerr=_bars(values), fmt="o", capsize=3, color=_COLOURS["measured"],
                  label="measured, 95 %", zorder=3)  # fmt: skip
    _sizes(axes, found, log=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"speed-up over {n[0]} {found.per[:-1] if n[0] == 1 else found.per}")
    axes.legend(frameon=False)


def _efficiency(axes: Axes, found: Analysis) -> None:
    n = [group.n for group in found.groups]
    values = [group.efficiency for group in found.groups]
    axes.axhline(1, linestyle=":", color=_COLOURS["ideal"], label="ideal")
    axes.axhline(found.knee.target, linestyle="-.", linewidth=1, color=_COLOURS["ideal"],
                 label=f"target {found.knee.target:.0%}")  # fmt: skip
    _curves(axes, found, per_unit=True)
    axes.errorbar(n, [v.value for v in values], yerr=_bars(values), fmt="o", capsize=3, color=_COLOURS["measured"],
                  label="measured, 95 %", zorder=3)  # fmt: skip
    _sizes(axes, found, log=True)
    axes.set_ylim(0, max(1.1, *(v.value * 1.1 for v in values)))
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False)


def _breakdown(axes: Axes, found: Analysis) -> None:
    groups = [group for group in found.groups if group.step_s is not None]
    bottom = np.zeros(len(groups))
    where = np.arange(len(groups))
    for part, colour in _PARTS.items():
        shares = [getattr(group, part) for group in groups]
        if all(share is None for share in shares):
            continue
        heights = np.array([1e3 * (group.step_s or 0) * (s or 0) for group, s in zip(groups, shares, strict=True)])
        axes.bar(where, heights, 0.6, bottom=bottom, color=colour, label=part.replace("_", " "))
        bottom += heights
    axes.set_xticks(where, [str(group.n) for group in groups])
    axes.set_xlabel(found.per)
    axes.set_ylabel("milliseconds per step")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=4)


def _spread(axes: Axes, found: Analysis, runs: pl.DataFrame) -> None:
    """Every run against the median of its size: a slow node shows as the one its slow runs share."""
    medians = {group.n: group.throughput.value for group in found.groups}
    sound = runs.filter(pl.col("throughput").is_not_null())
    places = sorted({node or "?" for node in sound["node_list"]})
    for row in sound.to_dicts():
        where = places.index(row["node_list"] or "?")
        axes.plot(where, row["throughput"] / medians[row[found.per]], "o", color=_COLOURS["node"], alpha=0.7)
    axes.axhline(1, linestyle=":", color=_COLOURS["ideal"])
    axes.set_xticks(range(len(places)), places, rotation=20 if len(places) > 4 else 0)
    axes.set_xlabel("nodes of the run")
    axes.set_ylabel("throughput / median of its size")
