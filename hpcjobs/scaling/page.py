"""A study on one page: HTML that needs no network, Markdown, and the tables and pictures beside them."""

from __future__ import annotations

import shlex
from pathlib import Path

import polars as pl

from hpcjobs.pages import figures
from hpcjobs.pages.html import render
from hpcjobs.scaling import plots, tables
from hpcjobs.scaling.analysis import Analysis
from hpcjobs.scaling.study import Study


def write(
    study: Study,
    analysis: Analysis,
    runs: pl.DataFrame,
    folder: Path,
    *,
    baseline: str | None = None,
    comparison: list[list[str]] | None = None,
) -> list[Path]:
    """index.html, report.md, runs.csv, runs.parquet and the pictures (PNG, SVG) in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = plots.figures(analysis, runs)
    written = figures.save(made, folder)
    html, markdown = folder / "index.html", folder / "report.md"
    inline = [(tables.CAPTIONS[name], figures.to_svg(figure)) for name, figure in made.items()]
    html.write_text(_html(study, analysis, runs, inline, baseline, comparison), encoding="utf-8")
    markdown.write_text(_markdown(study, analysis, runs, list(made), baseline, comparison), encoding="utf-8")
    runs.write_csv(folder / "runs.csv")
    runs.write_parquet(folder / "runs.parquet")
    return [html, markdown, folder / "runs.csv", folder / "runs.parquet", *written]


def _lead(study: Study) -> str:
    return f"{study.mode} scaling of {shlex.join(study.program)} on site {study.site}"


def _html(
    study: Study,
    analysis: Analysis,
    runs: pl.DataFrame,
    inline: list[tuple[str, str]],
    baseline: str | None,
    comparison: list[list[str]] | None,
) -> str:
    headers, rows = tables.sizes(analysis)
    return render(
        "study",
        title=f"Scaling study {study.name}",
        lead=_lead(study),
        warnings=tables.warnings(analysis),
        summary=analysis.summary,
        headers=tables.page_headers(headers),
        rows=rows,
        table_note=tables.TABLE_NOTE,
        pictures=inline,
        fits=tables.fit_rows(analysis),
        fit_note=tables.FIT_NOTE,
        baseline=baseline,
        comparison=comparison,
        run_headers=tables.RUN_HEADERS,
        runs=tables.run_rows(runs),
    )


def _markdown(
    study: Study,
    analysis: Analysis,
    runs: pl.DataFrame,
    names: list[str],
    baseline: str | None,
    comparison: list[list[str]] | None,
) -> str:
    headers, rows = tables.sizes(analysis)
    parts = [f"# Scaling study {study.name}", _lead(study)]
    parts += [f"> **{line}**" for line in tables.warnings(analysis)]
    parts.append("\n".join(f"- {line}" for line in analysis.summary))
    parts += [
        "## Sizes",
        _table(tables.page_headers(headers), rows),
        tables.TABLE_NOTE,
    ]
    parts += ["## Plots", *(f"![{tables.CAPTIONS[name]}]({name}.svg)" for name in names)]
    parts += [
        "## Fits",
        _table(["law", "verdict", "parameter", "value", "residuals, rms"], tables.fit_rows(analysis)),
        tables.FIT_NOTE,
    ]
    if comparison:
        parts += [f"## Comparison with {baseline}", _table(comparison[0], comparison[1:])]
    parts += ["## Runs", _table(list(tables.RUN_HEADERS), tables.run_rows(runs))]
    return "\n\n".join(parts) + "\n"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headers), line(["---"] * len(headers)), *map(line, rows)])
