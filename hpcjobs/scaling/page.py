"""The report of a study: tables as cells of text, figures of matplotlib, and the page in all its formats."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, PercentFormatter
from msgspec.structs import replace

from hpcjobs.files import file_name
from hpcjobs.jobstats.columns import format_energy
from hpcjobs.pages import PageTable, Picture, Section, figures, make_page_folder, render, save_file, save_parquet
from hpcjobs.pages.figures import COLOURS, GREY, INK, add_legend, choose_labels, escape_math, new_figure
from hpcjobs.scaling.analysis import Analysis, SizeResult
from hpcjobs.scaling.fits import Interval
from hpcjobs.scaling.runs import WHOLE_JOBS, suggest_metric
from hpcjobs.scaling.size_choice import count_of
from hpcjobs.scaling.study import Study
from hpcjobs.site.library import describe_partition
from hpcjobs.slurm_commands import read_hosts
from hpcjobs.units import format_number, human_duration, number_style

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
        for host in read_hosts(node_list) if node_list else [_UNKNOWN]:
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
_PARTS: Final = {"compute": COLOURS[0], "communication": COLOURS[1], "data_wait": COLOURS[4], "checkpoint": GREY}


def draw_figures(analysis: Analysis, runs: pl.DataFrame) -> dict[str, Figure]:
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


def draw_intervals(axes: Axes, points: Sequence[tuple[int, Interval]], **style: Any) -> None:
    """A point for each value, with error bars where it has an interval."""
    n, values = [n for n, _ in points], [value for _, value in points]
    below = [0.0 if v.low is None else max(0.0, v.value - v.low) for v in values]
    above = [0.0 if v.high is None else max(0.0, v.high - v.value) for v in values]
    axes.errorbar(n, [v.value for v in values], yerr=[below, above], capsize=3, **style)


def _curves(axes: Axes, analysis: Analysis, *, per_unit: bool) -> None:
    base, largest = analysis.groups[0].n, analysis.groups[-1].n
    where = np.geomspace(base, largest, 100)
    for fitted, colour in zip(analysis.fits, _COLOURS["fit"], strict=False):
        curve = [fitted.speedup(n, base) * (base / n if per_unit else 1) for n in where]
        is_excluded = analysis.can_exclude and fitted not in analysis.possible
        label = f"{fitted.law.name} (excluded)" if is_excluded else fitted.law.name
        axes.plot(where, curve, "--" if is_excluded else "-", color=colour, label=label)


def _draw_measured(axes: Axes, points: Sequence[tuple[int, Interval]]) -> None:
    label = "measured, 95 % interval"
    draw_intervals(axes, points, fmt="o", color=_COLOURS["measured"], label=label, zorder=3)


def _speedup(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.speedup for group in analysis.groups]
    axes.plot(n, [v / n[0] for v in n], ":", color=_COLOURS["ideal"], label="ideal")
    axes.set_yscale("log", base=2)
    _curves(axes, analysis, per_unit=False)
    _draw_measured(axes, list(zip(n, values, strict=True)))
    _size_axis(axes, analysis)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], min(v.value for v in values) / 2))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_ylabel(f"speed-up relative to {count_of(n[0], analysis.per)}")


def _efficiency(axes: Axes, analysis: Analysis) -> None:
    n = [group.n for group in analysis.groups]
    values = [group.efficiency for group in analysis.groups]
    axes.axhline(1, linestyle=":", color=_COLOURS["ideal"], label="ideal")
    axes.axhline(analysis.knee.target, linestyle="-.", linewidth=1, color=_COLOURS["ideal"],
                 label=f"target {analysis.knee.target:.0%}")  # fmt: skip
    _curves(axes, analysis, per_unit=True)
    _draw_measured(axes, list(zip(n, values, strict=True)))
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


_MEAN_NOTE: Final = (
    "the geometric mean of the runs, with its 95 % interval, for which the scatter of all sizes counts. Times and"
    " shares are medians of the runs."
)
_STEP_NOTE: Final = (
    " Compute, exposed communication (waiting for other ranks) and data wait (waiting for a batch) are shares of a"
    " step; checkpoint is its time relative to that of the steps."
)
CAPTIONS: Final = {
    "speedup": "Speed-up relative to the smallest size. Dashed: laws that the runs exclude.",
    "efficiency": "Efficiency: speed-up divided by the ideal speed-up.",
    "breakdown": "Median time of a step, by part. Communication is the exposed part.",
    "comparison": "Throughput of each study or series, and below it its ratio to the first one, with 95 % intervals.",
    "spread": "Throughput of each run, divided by the median of its size: one row per host, slowest host first."
    " A host is marked as slow if all its runs are slow.",
}
_TITLES: Final = {
    "speedup": "Speed-up",
    "efficiency": "Efficiency",
    "breakdown": "Time of a step",
    "comparison": "Comparison",
    "spread": "Runs by host",
}
_BEHIND: Final = {
    "speedup": ("nodes", "ranks", "runs", "speed-up"),
    "efficiency": ("nodes", "ranks", "runs", "efficiency"),
    "breakdown": ("nodes", "ranks", "step", "compute", "comm.", "data", "ckpt"),
}
"""The columns of `sizes` that a picture shows."""
_FIT_HEADERS: Final = ("law", "verdict", "parameter", "value", "residuals, rms")
MATRIX_NOTE: Final = (
    "Throughput of each series at each size (nodes x tasks per node): the geometric mean of the runs, with its 95 %"
    " interval, for which the scatter of all sizes counts. Each series has a page in a folder of its own."
)
FIT_NOTE: Final = (
    "X(1): throughput of one node or rank. serial: serial fraction (Amdahl, Gustafson). sigma: contention, kappa:"
    " crosstalk (USL). log: overhead that grows with log2 N. possible: the runs do not exclude the law. The law that is"
    " used has 95 % intervals, which hold if it is the true one."
)
_PAGE_HEADERS: Final = {
    "step": "step time",
    "comm.": "exposed communication",
    "data": "data wait",
    "ckpt": "checkpoint, relative to the steps",
    "CPU": "CPU efficiency",
    "GPU": "GPU utilisation",
    "epoch": "time of the steps of an epoch, without evaluations, checkpoints and the start",
}
"""Headers that are short in the terminal."""
NOT_MEASURED: Final = "not measured"
RUN_HEADERS: Final = ("job", "nodes", "ranks", "repeat", "state", "throughput", "hosts", "source", "run folder")


def sizes(analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    """Headers, and the cells of each size; without columns that were not measured."""
    table = [_cells(group, analysis.unit) for group in analysis.groups]
    known = [header for header in table[0] if any(row[header] not in ("-", NOT_MEASURED) for row in table)]
    return known, [[row[header] for header in known] for row in table]


def _cells(group: SizeResult, unit: str) -> dict[str, str]:
    paid = group.cost_per_million
    return {
        "nodes": str(group.nodes),
        "ranks": str(group.ranks),
        "runs": str(group.runs),
        unit: interval(group.throughput, number_style(group.throughput.value)),
        "speed-up": interval(group.speedup, ".2f"),
        "efficiency": interval(group.efficiency, ".0%"),
        "step": NOT_MEASURED if group.step_s is None else f"{1e3 * group.step_s:.1f} ms",
        "compute": share(group.compute),
        "comm.": share(group.communication),
        "data": share(group.data_wait),
        "ckpt": share(group.checkpoint),
        "CPU": share(group.cpu_efficiency),
        "GPU": share(group.gpu_utilization),
        "queue wait": NOT_MEASURED if group.queue_wait_s is None else human_duration(group.queue_wait_s),
        "epoch": NOT_MEASURED if group.epoch_s is None else human_duration(group.epoch_s),
        "energy": NOT_MEASURED if group.energy_j is None else format_energy(group.energy_j, group.energy_source),
        "cost / 10⁶ samples": NOT_MEASURED if paid is None else f"{format_number(paid)} {group.currency}",
    }


def share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.0%}"


def interval(value: Interval, style: str) -> str:
    """``3.61 (3.5 to 3.7)``; the value alone if the interval is missing or has no width."""
    if value.low is None or value.high is None or value.low == value.high:
        return f"{value.value:{style}}"
    return f"{value.value:{style}} ({value.low:{style}} to {value.high:{style}})"


def make_matrix(series: Mapping[str, Analysis]) -> list[list[str]]:
    """Rows of text, headers first: a series in each row, a size in each column."""
    sizes = {name_size(group): (group.ranks, group.nodes) for analysis in series.values() for group in analysis.groups}
    columns = sorted(sizes, key=lambda size: sizes[size])
    rows = [["series", *columns, "unit", "law", f"efficient up to, {next(iter(series.values())).per}"]]
    for name, analysis in series.items():
        by_size = {name_size(group): group.throughput for group in analysis.groups}
        cells = [
            interval(value, number_style(value.value)) if (value := by_size.get(size)) is not None else NOT_MEASURED
            for size in columns
        ]
        law = analysis.chosen.law.name if analysis.chosen is not None else "-"
        rows.append([name, *cells, analysis.unit, law, str(analysis.knee.measured or "-")])
    return rows


def name_size(group: SizeResult) -> str:
    """``2x4``: nodes, and tasks on each."""
    return f"{group.nodes}x{group.ranks // group.nodes}"


def fit_rows(analysis: Analysis) -> list[list[str]]:
    """Law, whether the runs exclude it, parameter, value, root mean square of the residuals."""
    rows = []
    for fitted in analysis.fits:
        verdict = "used" if fitted is analysis.chosen else "possible" if fitted in analysis.possible else "excluded"
        verdict = verdict if analysis.can_exclude else "-"
        for parameter, value in fitted.intervals.items():
            rate = parameter == "X(1)"
            name, style = (f"X(1), {analysis.unit}", number_style(value.value)) if rate else (parameter, ".4g")
            shown = interval(value, style) if fitted is analysis.chosen else f"{value.value:{style}}"
            rows.append([fitted.law.name, verdict, name, shown, f"{fitted.rms:.1%}"])
    return rows


def run_rows(runs: pl.DataFrame) -> list[list[str]]:
    return [
        [
            row["job_id"], str(row["nodes"]), str(row["ranks"]), str(row["repeat"]), row["state"] or "-",
            "-" if row["throughput"] is None else f"{format_number(row['throughput'])} {row['unit']}",
            row["node_list"] or "-", row["source"] or "-", row["run_dir"],
        ]
        for row in runs.to_dicts()
    ]  # fmt: skip


def warnings(analysis: Analysis, runs: pl.DataFrame | None = None) -> list[str]:
    lines = [f"This study mixes {what}. Its figures are not comparable." for what in analysis.mixed]
    if analysis.unit in WHOLE_JOBS:
        metric = None if runs is None else suggest_metric(runs)
        lines.append(
            f"The program leaves no figure: {analysis.unit} are of whole jobs, imports and the start of Python "
            "included. --metric 'tokens/s (\\S+)' reads a rate that the program prints; in Python, "
            "hpcjobs.runtime.start() and run.log(step, samples=N) measure the steps."
        )
        if metric is not None:
            lines.append(
                f"Its log prints a rate: --metric {shlex.quote(metric)} of hpcjobs scale, with another --name."
            )
    if analysis.left_out:
        lines.append(f"Runs without a measurement: {'; '.join(analysis.left_out)}.")
    return lines


def write(
    study: Study,
    series: Mapping[str, Analysis],
    runs: pl.DataFrame,
    folder: Path,
    *,
    comparisons: Sequence[tuple[str, list[list[str]]]] = (),
    picture: Figure | None = None,
) -> list[Path]:
    """index.html, report.md, runs.csv, runs.parquet and the pictures (PNG, SVG) in ``folder``.

    ``comparisons``: with another study, or of a series with the first one; ``picture`` shows them. Of several series,
    each has a page in a subfolder.
    """
    make_page_folder(folder)
    matrix = make_matrix(series) if len(series) > 1 else None
    made = {} if picture is None else {"comparison": picture}
    if matrix is None:
        (analysis,) = series.values()
        made = draw_figures(analysis, runs) | made
        short, rows = sizes(analysis)
        headers = [_PAGE_HEADERS.get(header, header) for header in short]
        fits, summary = fit_rows(analysis), analysis.summary
    else:
        headers, rows = matrix[0], matrix[1:]
        fits = [[name, *cells] for name, one in series.items() for cells in fit_rows(one)]
        summary = [f"{name}: {' '.join(one.summary)}" for name, one in series.items()]
        for name, one in series.items():
            part = runs.filter(pl.col("series") == name)
            write(replace(study, name=f"{study.name}: {name}"), {"": one}, part, folder / file_name(name))
    written = figures.save(made, folder)
    lines = list(dict.fromkeys(line for one in series.values() for line in warnings(one, runs)))
    title = f"Scaling study {study.name}"
    html, markdown = folder / "index.html", folder / "report.md"
    of_series = [] if matrix is None else ["series"]
    note = _note(study, next(iter(series.values()))) if matrix is None else MATRIX_NOTE
    tables = {"Sizes": PageTable(headers, rows, note), "Fits": PageTable([*of_series, *_FIT_HEADERS], fits, FIT_NOTE)}
    tables |= {f"Comparison with {name}": PageTable(table[0], table[1:]) for name, table in comparisons}
    listed = run_rows(runs)
    if matrix is not None:
        listed = [[name, *cells] for name, cells in zip(runs["series"].to_list(), listed, strict=True)]
    tables["Runs"] = PageTable([*of_series, *RUN_HEADERS], listed)
    pictures = [
        Picture(_TITLES[name], CAPTIONS[name], figures.to_svg(figure), _table_behind(name, series, runs, comparisons))
        for name, figure in made.items()
    ]
    page = render(
        title=title,
        lead=_lead(study),
        facts=_facts(study, series, runs),
        warnings=lines,
        sections=[
            Section("Summary", summary),
            Section("Sizes", table=tables["Sizes"]),
            *([Section("Pictures", pictures=pictures)] if pictures else []),
            *(Section(name, table=table) for name, table in tables.items() if name != "Sizes" and table.rows),
        ],
    )
    save_file(html, page)
    save_file(markdown, _markdown(title, _lead(study), lines, summary, list(made), tables))
    save_file(folder / "runs.csv", runs.write_csv())
    save_parquet(folder / "runs.parquet", runs)
    return [html, markdown, folder / "runs.csv", folder / "runs.parquet", *written]


def _note(study: Study, analysis: Analysis) -> str:
    """A note that explains the figures in the table of sizes."""
    if analysis.unit in WHOLE_JOBS:
        what, of_steps = "Throughput is of whole jobs", ""
    elif study.metric:
        what, of_steps = f"{analysis.unit or 'Throughput'} is the figure of merit in the program's log", ""
    else:
        what = "Throughput is work over the time of the steps, without evaluations, checkpoints and the first two steps"
        of_steps = _STEP_NOTE
    modelled = any((group.energy_source or "measured") != "measured" for group in analysis.groups)
    return f"{what}: {_MEAN_NOTE}{of_steps}{' ~: modelled with the watts of the site.' if modelled else ''}"


def _lead(study: Study) -> str:
    return f"{study.mode} scaling of {shlex.join(study.program)} on site {study.site}"


def _table_behind(
    name: str, series: Mapping[str, Analysis], runs: pl.DataFrame, comparisons: Sequence[tuple[str, list[list[str]]]]
) -> PageTable | None:
    """The figures that a picture shows: columns of the sizes, hosts, or the comparison."""
    if name == "comparison":
        return next((PageTable(table[0], table[1:]) for _, table in comparisons), None)
    (analysis,) = series.values()
    if name == "spread":
        hosts = [
            [one.host, str(len(one.relative)), f"{max(one.relative):.3f}", "yes" if one.slow else "no"]
            for one in host_spread(runs, per=analysis.per)
        ]
        return PageTable(("host", "runs", "fastest, relative", "slow"), hosts)
    headers, rows = sizes(analysis)
    chosen = [headers.index(column) for column in _BEHIND[name] if column in headers]
    return PageTable([headers[n] for n in chosen], [[row[n] for n in chosen] for row in rows])


def _facts(study: Study, series: Mapping[str, Analysis], runs: pl.DataFrame) -> dict[str, str | None]:
    """The facts that a reader needs to compare this study with another one."""

    def values(column: str) -> str | None:
        return ", ".join(sorted(set(map(str, runs[column].drop_nulls())))) or None

    partition = values("partition")
    ends = runs["ended"].drop_nulls().sort().to_list()
    days = [time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(moment)) for moment in ends]
    counts = [group.runs for analysis in series.values() for group in analysis.groups]
    repeats = f"{min(counts)}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return {
        "mode": f"{study.mode} scaling, {repeats} runs of each size",
        "site": study.site,
        "partition": partition,
        "nodes": describe_partition(study.site, partition),
        "device": values("node_model"),
        "measured": f"{days[0]} to {days[-1]}" if days else None,
        "code": values("code"),
        "image": values("image"),
        "torch": values("torch_version"),
        "unit": ", ".join(sorted({analysis.unit for analysis in series.values()})),
        "interval": "95 %; the scatter of all sizes counts",
        "source": f"figures of the runs; accounting by {values('source') or 'nobody'}",
    }


def _markdown(
    title: str, lead: str, warnings: list[str], summary: list[str], names: list[str], tables: Mapping[str, PageTable]
) -> str:
    parts = [f"# {title}", lead, *(f"> **{line}**" for line in warnings), "\n".join(f"- {line}" for line in summary)]
    for name, table in tables.items():
        parts += [f"## {name}", _table(list(table.headers), table.rows), *filter(None, [table.note])]
        if name == "Sizes":
            parts += ["## Plots", *(f"![{CAPTIONS[picture]}]({picture}.svg)" for picture in names)]
    return "\n\n".join(parts) + "\n"


def _table(headers: list[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(headers), line(["---"] * len(headers)), *map(line, rows)])
