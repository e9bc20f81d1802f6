"""A sweep on one page: the best parameters, pictures and cells, with the rows as CSV and Parquet."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from msgspec import UNSET

from hpcjobs.pages import PageTable, Picture, Section, figures, make_page_folder, render, save_file, save_parquet
from hpcjobs.pages.figures import BEHIND, COLOURS, GREY, INK, add_legend, choose_labels, escape_math, new_figure
from hpcjobs.site.library import describe_partition
from hpcjobs.sweeps.folder import Definition
from hpcjobs.units import cell, format_count

Row = dict[str, Any]
_MAP = LinearSegmentedColormap.from_list("results", mpl.colormaps["viridis_r"](np.linspace(0.08, 0.72, 64)))
"""The middle of the map: neither end vanishes on a light or on a dark page."""
_MOST_TICKS = 12
_LARGEST = 1e100
"""Larger values, infinity and NaN have a place on an axis like text."""
_BEHIND_TEXT: Final = {"boxstyle": "square,pad=0.1", "facecolor": BEHIND, "edgecolor": "none", "alpha": 0.8}
"""Lines do not run through a label."""


def draw_figures(rows: Sequence[Row], params: Sequence[str], metric: str, *, best: Row) -> dict[str, Figure]:
    """Picture name -> figure: ``effect`` of the one parameter that varies, ``heatmap`` of two that were crossed,
    ``parallel`` coordinates of two or more. Empty if all are constant.

    ``rows`` all have a number for ``metric``.
    """
    varied = [name for name in params if len({row.get(name) for row in rows}) > 1]
    if len(varied) == 1:
        return {"effect": _effect(rows, varied[0], metric, best)}
    made = {}
    if len(varied) == 2 and len({tuple(row.get(name) for name in varied) for row in rows}) > 3:
        made["heatmap"] = _heatmap(rows, varied, metric)
    if varied:
        made["parallel"] = _parallel(rows, [*varied, metric], metric, best)
    return made


class _Scale:
    """Places of the values of one parameter or metric on an axis from 0 to 1: numbers on a linear scale (a logarithmic
    one if they span more than a factor of 50), other values in the order of the rows."""

    def __init__(self, rows: Sequence[Row], name: str) -> None:
        self.values: list[Any] = list(dict.fromkeys(row.get(name) for row in rows))
        self.numeric = all(map(_has_place, self.values))
        if self.numeric:
            self.values.sort()
            low, high = self.values[0], self.values[-1]
            self.norm: Normalize = LogNorm(low, high) if low > 0 and high / low > 50 else Normalize(low, high)

    def place(self, value: Any) -> float:
        if self.numeric:
            return float(np.asarray(self.norm(value)))
        return [*map(str, self.values)].index(str(value)) / max(1, len(self.values) - 1)  # NaN != NaN

    def ticks(self) -> list[tuple[float, str]]:
        """Place and label of each value, or of some where there are too many to read."""
        shown = self.values
        if len(shown) > _MOST_TICKS:
            shown = [self.values[round(n)] for n in np.linspace(0, len(self.values) - 1, 5)]
        if len(shown) > 1:
            shown = [shown[index] for index in choose_labels([self.place(value) for value in shown], gap=0.05)]
        return [(self.place(value), _short(value)) for value in shown]

    def colour(self, value: Any) -> Any:
        return _MAP(self.place(value))

    def mappable(self) -> ScalarMappable:
        return ScalarMappable(self.norm, _MAP)


def _has_place(value: Any) -> bool:
    """Whether ``value`` is a number that an axis can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape_math(text if len(text) <= 18 else f"{text[:17]}…")


def _effect(rows: Sequence[Row], param: str, metric: str, best: Row) -> Figure:
    figure, axes = new_figure()
    scale = _Scale(rows, param)
    axes.plot([scale.place(row.get(param)) for row in rows], [row[metric] for row in rows], "o", alpha=0.7)
    axes.plot(scale.place(best.get(param)), best[metric], "o", ms=11, mfc="none", mec=COLOURS[1], mew=2, label="best")
    axes.set_xticks(*map(list, zip(*scale.ticks(), strict=True)))
    axes.set_xlabel(escape_math(param))
    axes.set_ylabel(escape_math(metric))
    add_legend(figure)
    return figure


def _heatmap(rows: Sequence[Row], pair: Sequence[str], metric: str) -> Figure:
    """The mean over cells that share both values; white without a cell."""
    figure, axes = new_figure()
    across, down = (_Scale(rows, name) for name in pair)
    colours = _Scale(rows, metric)
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        where = down.values.index(row.get(pair[1])), across.values.index(row.get(pair[0]))
        cells.setdefault(where, []).append(row[metric])
    grid = np.full((len(down.values), len(across.values)), np.nan)
    for where, values in cells.items():
        grid[where] = np.mean(values)
    axes.grid(visible=False)
    axes.imshow(grid, cmap=_MAP, norm=colours.norm, aspect="auto", origin="lower")
    if grid.size <= 64:
        for (y, x), value in np.ndenumerate(grid):
            if not np.isnan(value):
                ink = "white" if colours.place(value) > 0.5 else "black"
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(across.values)), [_short(value) for value in across.values])
    axes.set_yticks(range(len(down.values)), [_short(value) for value in down.values])
    axes.set_xlabel(escape_math(pair[0]))
    axes.set_ylabel(escape_math(pair[1]))
    figure.colorbar(colours.mappable(), ax=axes, label=escape_math(metric))
    return figure


def _parallel(rows: Sequence[Row], names: Sequence[str], metric: str, best: Row) -> Figure:
    """One line per cell over one axis per parameter, the metric last and in colour."""
    figure, axes = new_figure(width=max(4.8, 1.3 * len(names)))
    scales = [_Scale(rows, name) for name in names]
    for row in rows:
        heights = [scale.place(row.get(name)) for scale, name in zip(scales, names, strict=True)]
        axes.plot(heights, color=scales[-1].colour(row[metric]), alpha=0.6, linewidth=1)
    heights = [scale.place(best.get(name)) for scale, name in zip(scales, names, strict=True)]
    axes.plot(heights, color=COLOURS[1], linewidth=2.5, label="best")
    _upright(axes, names, scales)
    add_legend(figure)
    return figure


def _upright(axes: Axes, names: Sequence[str], scales: Sequence[_Scale]) -> None:
    """Draw a vertical axis for each name, with its values."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_xticks(range(len(names)), [escape_math(name) for name in names])
    axes.set_xlim(-0.2, len(names) - 0.6)
    for where, scale in enumerate(scales):
        axes.axvline(where, color=GREY, linewidth=1, zorder=0)
        for height, text in scale.ticks():
            axes.annotate(text, (where, height), xytext=(4, 2), textcoords="offset points", fontsize=9, color=INK,
                          bbox=_BEHIND_TEXT)  # fmt: skip


_CAPTIONS = {
    "effect": "One point per completed cell. The best cell is marked.",
    "heatmap": "Mean of the cells with the same two values. Empty: no completed cell.",
    "parallel": "One line per completed cell, coloured by the metric on the last axis.",
}
_TITLES = {"effect": "Effect of the parameter", "heatmap": "Two parameters", "parallel": "All parameters"}
_MOST_BEHIND = 20
_HEADERS = {"elapsed_s": "elapsed (s)", "job_id": "job", "folder": "run folder"}
_MOST_ROWS = 2000


def write(
    name: str,
    rows: Sequence[dict[str, Any]],
    params: Sequence[str],
    folder: Path,
    *,
    compared: Sequence[dict[str, Any]],
    metric: str,
    largest: bool,
    facts: Mapping[str, str | None] | None = None,
) -> list[Path]:
    """index.html, results.csv, results.parquet and the pictures (PNG, SVG) in ``folder``; rows as `Results` has them.

    Args:
        facts: facts common to all cells: program, site, partition, nodes, date.
        compared: the ``rows`` that have a rank by ``metric``, best first; the others are counted.
    """
    make_page_folder(folder)
    made = draw_figures(compared, params, metric, best=compared[0]) if compared else {}
    written = figures.save(made, folder)
    columns = [*params, metric, "state", "elapsed_s", "nodes", "job_id", "folder"]
    cells = format_count(len(rows), "cell")
    headers = [_HEADERS.get(column, column) for column in columns]
    ranked = {row["cell"] for row in compared}
    ordered = [*compared, *(row for row in rows if row["cell"] not in ranked)]
    shown = [[cell(row.get(column)) for column in columns] for row in ordered[:_MOST_ROWS]]
    best = [[cell(row.get(name)) for name in (*params, metric, "job_id")] for row in compared[:_MOST_BEHIND]]
    note = f"The best {_MOST_BEHIND} of {len(compared)}." if len(compared) > _MOST_BEHIND else None
    behind = PageTable([*params, metric, "job"], best, note)
    pictures = [
        Picture(_TITLES[kind], _CAPTIONS[kind], figures.to_svg(figure), behind) for kind, figure in made.items()
    ]
    page = render(
        title=f"Sweep {name}",
        lead=f"{cells} over {', '.join(params)}; {'largest' if largest else 'smallest'} {metric} is best",
        facts={**(facts or {}), "compared by": metric, "unit": "as the program writes it",
               "interval": "none: each cell ran once", "source": "summary.json and state.json of each cell"},
        warnings=_warnings(rows, compared, metric),
        sections=[
            Section("Summary", _summarise(compared, params, metric)),
            *([Section("Pictures", pictures=pictures)] if pictures else []),
            Section("Cells, best first" if compared else "Cells", table=PageTable(headers, shown)),
        ],
    )  # fmt: skip
    save_file(folder / "index.html", page)
    every = list(dict.fromkeys(key for row in rows for key in row))
    frame = pl.DataFrame({key: [_storable(row.get(key)) for row in rows] for key in every}, strict=False)
    save_file(folder / "results.csv", frame.write_csv())
    save_parquet(folder / "results.parquet", frame)
    return [folder / "index.html", folder / "results.csv", folder / "results.parquet", *written]


def facts_of(definition: Definition) -> dict[str, str | None]:
    """Program, site, partition and its nodes."""
    job = definition.job
    partition = None if job.resources.partition is UNSET else job.resources.partition
    size = f"{format_count(job.nodes, 'node')}, {format_count(job.ntasks_per_node, 'task')} on each"
    return {
        "program": shlex.join(job.argv),
        "site": job.site,
        "partition": partition,
        "nodes": describe_partition(job.site_file, partition),
        "size of a run": size,
    }


def _warnings(rows: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]], metric: str) -> list[str]:
    warnings = []
    others = Counter(row["state"] for row in rows if row["state"] != "COMPLETED")
    if others:
        states = ", ".join(f"{format_count(count, 'cell')} {state}" for state, count in others.most_common())
        warnings.append(f"Not compared: {states}.")
    if silent := len(rows) - len(compared) - others.total():
        warnings.append(f"{format_count(silent, 'cell')} completed without a finite value of {metric}.")
    if len(rows) > _MOST_ROWS:
        warnings.append(f"The table below has the first {_MOST_ROWS} of {len(rows)} cells; results.csv has all.")
    return warnings


def _summarise(compared: Sequence[dict[str, Any]], params: Sequence[str], metric: str) -> list[str]:
    if not compared:
        return [f"No completed cell has a finite value of {metric}."]
    best, last = compared[0], compared[-1]
    params_of_best = ", ".join(f"{name} {cell(best.get(name))}" for name in params)
    count = format_count(len(compared), "compared cell")
    return [
        f"Best: {metric} {cell(best[metric])} with {params_of_best} (job {best['job_id']}).",
        f"{metric} of the {count}: from {cell(best[metric])} (best) to {cell(last[metric])}.",
    ]


def _storable(value: object) -> object:
    """``value``, or as text an integer that 64 bits do not hold."""
    return str(value) if isinstance(value, int) and value.bit_length() > 63 else value
