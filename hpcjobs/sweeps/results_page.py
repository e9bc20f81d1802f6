"""A sweep on one page: the best parameters, pictures and cells, with the rows as CSV and Parquet."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from msgspec import UNSET

from hpcjobs.errors import ConfigError
from hpcjobs.pages import PageTable, Picture, Section, figures, render
from hpcjobs.pages.save import save_csv, save_parquet, save_text
from hpcjobs.site.library import load_site
from hpcjobs.site.partition import describe_nodes
from hpcjobs.sweeps import results_plots
from hpcjobs.sweeps.folder import Definition
from hpcjobs.units import format_count

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
    folder.mkdir(parents=True, exist_ok=True)
    made = results_plots.figures(compared, params, metric, best=compared[0]) if compared else {}
    written = figures.save(made, folder)
    columns = [*params, metric, "state", "elapsed_s", "nodes", "job_id", "folder"]
    cells = format_count(len(rows), "cell")
    headers = [_HEADERS.get(column, column) for column in columns]
    shown = [[cell(row.get(column)) for column in columns] for row in _in_order(rows, compared)[:_MOST_ROWS]]
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
    save_text(folder / "index.html", page)
    every = list(dict.fromkeys(key for row in rows for key in row))
    frame = pl.DataFrame({key: [_storable(row.get(key)) for row in rows] for key in every}, strict=False)
    save_csv(folder / "results.csv", frame)
    save_parquet(folder / "results.parquet", frame)
    return [folder / "index.html", folder / "results.csv", folder / "results.parquet", *written]


def facts_of(definition: Definition) -> dict[str, str | None]:
    """Program, site, partition and its nodes."""
    job = definition.job
    partition = None if job.resources.partition is UNSET else job.resources.partition
    try:
        site = load_site(job.site_file)
        nodes = describe_nodes(site.partitions[partition]) if partition in site.partitions else None
    except ConfigError:  # without the site file, only its name is known
        nodes = None
    size = f"{format_count(job.nodes, 'node')}, {format_count(job.ntasks_per_node, 'task')} on each"
    return {
        "program": shlex.join(job.argv),
        "site": job.site,
        "partition": partition,
        "nodes": nodes,
        "size of a run": size,
    }


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
