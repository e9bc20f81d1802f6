"""A sweep on one page: which parameters did best, with pictures, and the rows beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from hpcjobs.pages import figures, render
from hpcjobs.pages.save import save_csv, save_parquet, save_text
from hpcjobs.sweeps import results_plots
from hpcjobs.units import format_count

_CAPTIONS = {
    "effect": "One point per completed cell. The best cell is marked.",
    "heatmap": "Mean of the cells with the same two values. White: no completed cell.",
    "parallel": "One line per completed cell, coloured by the metric on the last axis.",
}
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
) -> list[Path]:
    """index.html, results.csv, results.parquet and the pictures (PNG, SVG) in ``folder``; rows as `Results` has them.

    Args:
        compared: those of ``rows`` that have a rank by ``metric``, best first; the others are counted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = results_plots.figures(compared, params, metric, best=compared[0]) if compared else {}
    written = figures.save(made, folder)
    columns = [*params, metric, "state", "elapsed_s", "nodes", "job_id", "folder"]
    cells = format_count(len(rows), "cell")
    page = render(
        "sweep",
        title=f"Sweep {name}",
        lead=f"{cells} over {', '.join(params)}; {'largest' if largest else 'smallest'} {metric} is best",
        warnings=_warnings(rows, compared, metric),
        summary=_summarise(compared, params, metric),
        pictures=[(_CAPTIONS[kind], figures.to_svg(figure)) for kind, figure in made.items()],
        metric=metric,
        headers=[_HEADERS.get(column, column) for column in columns],
        rows=[[cell(row.get(column)) for column in columns] for row in _in_order(rows, compared)[:_MOST_ROWS]],
    )
    save_text(folder / "index.html", page)
    every = list(dict.fromkeys(key for row in rows for key in row))
    frame = pl.DataFrame({key: [_storable(row.get(key)) for row in rows] for key in every}, strict=False)
    save_csv(folder / "results.csv", frame)
    save_parquet(folder / "results.parquet", frame)
    return [folder / "index.html", folder / "results.csv", folder / "results.parquet", *written]


def _in_order(rows: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = {row["cell"] for row in compared}
    return [*compared, *(row for row in rows if row["cell"] not in ids)]


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


def cell(value: object) -> str:
    """A parameter or a metric as text."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
