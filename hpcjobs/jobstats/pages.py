"""The pages of `hpcjobs report jobs` and `report load`.

Jobs: use and waiting over time, waits by size and hour, the largest wastes. Load: GPU, CPU and memory of a job's nodes
over time, one line per node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from matplotlib.figure import Figure

from hpcjobs.jobstats.columns import JobFilter
from hpcjobs.jobstats.sources import AccountingTable, read_request
from hpcjobs.jobstats.totals import totals
from hpcjobs.jobstats.usage import Advice, JobUsage, advise
from hpcjobs.pages import PageTable, Picture, Section, figures, make_page_folder, render, save_file, save_parquet
from hpcjobs.record.monitor import Sample
from hpcjobs.run.index import Entry
from hpcjobs.run.progress import NodeSamples
from hpcjobs.site.library import describe_partition
from hpcjobs.site.models import Site
from hpcjobs.site.partition import describe_nodes
from hpcjobs.units import format_count, format_number, human_duration

_GROUPS: Final = ("user", "account", "partition", "state")
_MOST_GROUPS: Final = 6
_OTHERS: Final = "others"
_INTERVALS_S: Final = (900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400)
_MOST_INTERVALS: Final = 60
_MOST_WASTES: Final = 10
_SIZES: Final = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, None))


class Intervals(NamedTuple):
    """Parts of the period, of one length."""

    begin: int
    length_s: int
    number: int

    @property
    def label(self) -> str:
        days, hours = self.length_s // 86400, self.length_s // 3600
        return format_count(days, "day") if days else format_count(hours, "hour") if hours else "15 minutes"

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        return self.begin + self.length_s * np.arange(self.number + 1, dtype=np.float64)


def choose_intervals(begin: float, end: float) -> Intervals:
    """Intervals of the shortest length that covers the period with at most sixty."""
    length = next((one for one in _INTERVALS_S if (end - begin) / one <= _MOST_INTERVALS), _INTERVALS_S[-1])
    midnight = int(datetime.fromtimestamp(begin).replace(hour=0, minute=0, second=0, microsecond=0).timestamp())
    first = midnight + int((begin - midnight) // length) * length
    return Intervals(first, length, max(1, -(-int(end - first) // length)))


def mean_over_intervals(jobs: pl.DataFrame, intervals: Intervals, first: str, last: str, weight: str) -> list[float]:
    """The sum of ``weight`` over the jobs that are between the times ``first`` and ``last``, mean of each interval."""
    begins, ends, weights = (jobs[name].cast(pl.Float64).to_numpy() for name in (first, last, weight))
    edges = intervals.edges
    # Seconds of each job before an edge: their differences are those within an interval.
    before = np.array([(np.clip(edge - begins, 0, ends - begins) * weights).sum() for edge in edges])
    return [float(value) for value in np.diff(before) / intervals.length_s]


def write_jobs(table: AccountingTable, folder: Path, job_filter: JobFilter, *, site: Site) -> list[Path]:
    """Write index.html, jobs.parquet and the pictures (PNG, SVG) to ``folder``."""
    make_page_folder(folder)
    now = time.time()
    end = now if job_filter.until is None else min(now, job_filter.until)
    jobs = table.jobs
    known = jobs.select(pl.min_horizontal("eligible", "started", "submitted"))["eligible"].drop_nulls()
    begin = job_filter.since if job_filter.job_ids is None else float(known.min() or end)  # type: ignore[arg-type]
    intervals = choose_intervals(begin, end)
    made: dict[str, Figure] = {}
    sections = [
        Section("Summary", _summarise(jobs), table=_sums(table.attempts)),
        *_over_time(table.attempts, intervals, now, made),
        _waits(jobs, made),
        *_wastes(jobs),
    ]
    page = render(
        title=f"Jobs on {site.name}",
        lead=f"{format_count(len(jobs), 'job')}, {_clock(begin)} to {_clock(end)}",
        facts=_facts(table, job_filter, site, intervals, begin, end),
        warnings=[*table.notes, *(f"{one.rows} doubtful rows: {one.kind}: {one.examples[0]}" for one in table.doubts)],
        sections=[one for one in sections if one.lines or one.table or one.pictures],
    )
    save_file(folder / "index.html", page)
    save_parquet(folder / "jobs.parquet", jobs)
    return [folder / "index.html", folder / "jobs.parquet", *figures.save(made, folder)]


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _facts(
    table: AccountingTable, job_filter: JobFilter, site: Site, intervals: Intervals, begin: float, end: float
) -> dict[str, str | None]:
    names = sorted(set(table.jobs["partition"].drop_nulls()) & set(site.partitions))
    return {
        "period": f"{_clock(begin)} to {_clock(end)} {time.strftime('%Z')}",
        "site": site.name,
        "cluster": job_filter.cluster,
        "partitions": "; ".join(f"{name}: {describe_nodes(site.partitions[name])}" for name in names),
        "users": "all that the source shows" if job_filter.users is None else ", ".join(job_filter.users),
        "other filters": ", ".join(
            filter(None, (job_filter.account, job_filter.name, *(job_filter.states or ()), *(job_filter.job_ids or ())))
        ),
        "interval": f"{intervals.label}, local time",
        "source": ", ".join(sorted(set(table.jobs["source"].drop_nulls()))),
    }


def _summarise(jobs: pl.DataFrame) -> list[str]:
    if jobs.is_empty():
        return ["No jobs."]
    states = jobs["state"].value_counts(sort=True).rows()
    lines = [f"States: {', '.join(f'{count} {state}' for state, count in states)}."]
    waits = jobs["queue_wait_s"].drop_nulls()
    if len(waits):
        half, most = map(human_duration, _quantiles(waits, (0.5, 0.9)))
        lines.append(f"Half of the jobs waited at most {half}, nine of ten at most {most}.")
    measured = jobs.filter(pl.col("cpu_s").is_not_null() & (pl.col("cpus") * pl.col("elapsed_s") > 0))
    if len(measured):
        held = float((measured["cpus"] * measured["elapsed_s"]).sum())
        used = float(measured["cpu_s"].sum())
        lines.append(
            f"CPUs worked {used / held:.0%} of the time that they were allocated"
            f" ({format_number(used / 3600)} of {format_number(held / 3600)} CPU hours)."
        )
    return lines


def _sums(attempts: pl.DataFrame) -> PageTable | None:
    if attempts.is_empty():
        return None
    rows = totals([attempts], by="user").head(20).to_dicts()
    cells = [
        [str(row["user"]), str(row["jobs"]), str(row["failed"]),
         f"{row['cpu_h'] or 0:,.1f}", f"{row['gpu_h'] or 0:,.1f}",
         *("-" if row[name] is None else f"{row[name]:.0%}" for name in ("cpu_efficiency", "mem_efficiency")),
         "-" if row["mean_wait_s"] is None else human_duration(row["mean_wait_s"]), f"{row['lost_h'] or 0:,.1f}",
         "-" if row["cost"] is None else f"{row['cost']:,.2f} {row['currency']}"]
        for row in rows
    ]  # fmt: skip
    headers = ("user", "jobs", "failed", "CPU hours", "GPU hours", "CPU efficiency", "memory efficiency", "mean wait",
               "lost hours", "cost")  # fmt: skip
    return PageTable(headers, cells, "The users with the most allocated CPU hours. Efficiency: used over requested.")


def _over_time(attempts: pl.DataFrame, intervals: Intervals, now: float, made: dict[str, Figure]) -> list[Section]:
    """Use and waiting, each stacked by every group that has several values."""
    if attempts.is_empty():
        return []
    rows = attempts.with_columns(
        pl.col(_GROUPS).fill_null("-"),
        _run_end=pl.coalesce("ended", pl.lit(int(now))),
        _wait_end=pl.coalesce("started", "ended", pl.lit(int(now))),
        _one=pl.lit(1),
    )
    sections = []
    kinds = [
        ("use", "CPUs in use", "cpus", "started", "_run_end", "Allocated CPUs, mean of each interval"),
        ("gpu-use", "GPUs in use", "gpus", "started", "_run_end", "Allocated GPUs, mean of each interval"),
        ("waiting", "Jobs waiting", "_one", "eligible", "_wait_end", "Jobs that could start, mean of each interval"),
    ]
    for kind, title, weight, first, last, caption in kinds:
        sound = rows.filter(
            pl.all_horizontal(pl.col(first, last, weight).is_not_null()) & (pl.col(last) > pl.col(first))
        )
        sound = sound.filter(pl.col(weight) > 0)
        pictures, single = [], []
        for group in _GROUPS if len(sound) else ():
            series = _series(sound, group, intervals, first, last, weight)
            if len(series) == 1 and group != "user":
                single.append(f"{group} {next(iter(series))}")
                continue
            figure = _stack(series, intervals, title)
            made[f"{kind}-by-{group}"] = figure
            note = f"{caption} of {intervals.label}."
            pictures.append(Picture(f"{title}, by {group}", note, figures.to_svg(figure), _behind(series, intervals)))
        lines = [f"All of it: {', '.join(single)}."] if single else []
        if pictures:
            sections.append(Section(f"{title} over time", lines, pictures=pictures))
    return sections


def _series(
    rows: pl.DataFrame, group: str, intervals: Intervals, first: str, last: str, weight: str
) -> dict[str, list[float]]:
    """Group -> mean of each interval; the smaller groups are one."""
    by_size = (
        rows.group_by(group)
        .agg(size=((pl.col(last) - pl.col(first)) * pl.col(weight)).sum())
        .sort("size", group, descending=[True, False])[group]
        .to_list()
    )
    shown = by_size if len(by_size) <= _MOST_GROUPS + 1 else by_size[:_MOST_GROUPS]
    parts = {name: rows.filter(pl.col(group) == name) for name in shown}
    if len(shown) < len(by_size):
        parts[_OTHERS] = rows.filter(~pl.col(group).is_in(shown))
    return {name: mean_over_intervals(part, intervals, first, last, weight) for name, part in parts.items()}


def _stack(series: dict[str, list[float]], intervals: Intervals, label: str) -> Figure:
    figure, axes = figures.new_figure()
    edges = intervals.edges
    bottom = np.zeros(intervals.number)
    for (name, values), colour in zip(series.items(), figures.COLOURS, strict=False):
        top = bottom + np.array(values)
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=figures.escape_math(name[:24]))
        bottom = top
    ticks = _ticks(intervals)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(1.0, float(bottom.max()) * 1.05))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylabel(label)
    figures.add_legend(figure)
    return figure


def _ticks(intervals: Intervals) -> dict[float, str]:
    """Some of the edges, with the day or, within a day, the hour."""
    midnights = [float(edge) for edge in intervals.edges if _clock(edge).endswith("00:00")]
    places, form = (midnights, "%d %b") if len(midnights) > 2 else (list(map(float, intervals.edges)), "%d %b %H:%M")
    gap = 0.13 if len(midnights) > 2 else 0.25
    labelled = figures.choose_labels(places, gap=gap)
    return {places[n]: time.strftime(form, time.localtime(places[n])) for n in labelled}


def _behind(series: dict[str, list[float]], intervals: Intervals) -> PageTable:
    rows = [
        [_clock(begin), *(f"{values[n]:,.1f}" for values in series.values())]
        for n, begin in enumerate(intervals.edges[:-1])
    ]
    return PageTable(["from", *series], rows)


def _waits(jobs: pl.DataFrame, made: dict[str, Figure]) -> Section:
    """Percentiles of the queue wait by nodes and by hour of the day."""
    known = jobs.filter(pl.col("queue_wait_s").is_not_null() & pl.col("nodes").is_not_null())
    if known.is_empty():
        return Section("Waits")
    by_size = {
        (str(low) if low == high else f"{low}+" if high is None else f"{low} to {high}"): known.filter(
            (pl.col("nodes") >= low) & (pl.col("nodes") <= (high or 1 << 40))
        )["queue_wait_s"]
        for low, high in _SIZES
    }
    timed = known.filter(pl.col("eligible").is_not_null())
    hours = pl.Series([time.localtime(moment).tm_hour for moment in timed["eligible"]], dtype=pl.Int64)
    by_hour = {str(hour): timed.filter(hours == hour)["queue_wait_s"] for hour in range(24)}
    pictures = []
    for name, title, label, groups in (
        ("wait-by-size", "Wait by size", "nodes of the job", by_size),
        ("wait-by-hour", "Wait by hour", "hour of the day when the job could start", by_hour),
    ):
        present = {key: values for key, values in groups.items() if len(values)}
        made[name] = _draw_waits(present, label)
        caption = (
            "Time from being able to start to the start: half of the jobs waited no longer than the point, nine of ten"
            " no longer than the upper end of the line, one of ten no longer than its lower end."
        )
        pictures.append(Picture(title, caption, figures.to_svg(made[name]), _wait_table(present, label)))
    return Section("Waits", pictures=pictures)


def _quantiles(values: pl.Series, shares: Sequence[float]) -> list[float]:
    """The smallest values that at least these shares of the values do not exceed (nearest rank)."""
    return [float(value) for value in np.quantile(values.to_numpy(), shares, method="inverted_cdf")]


def _draw_waits(groups: dict[str, pl.Series], label: str) -> Figure:
    figure, axes = figures.new_figure()
    places = np.arange(len(groups))
    low, middle, high = np.array([_quantiles(values, (0.1, 0.5, 0.9)) for values in groups.values()]).T / 60
    axes.vlines(places, low, high, color=figures.COLOURS[0], linewidth=2, label="10 to 90 %")
    axes.plot(places, middle, "o", color=figures.COLOURS[1], label="median")
    labelled = range(0, len(groups), -(-len(groups) // 9))
    axes.set_xticks(places, [key if n in labelled else "" for n, key in enumerate(groups)])
    if high.max() > 100:
        axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda minutes, _: human_duration(minutes * 60).removesuffix("00s"))
    axes.set_xlabel(label)
    axes.set_ylabel("wait in the queue")
    figures.add_legend(figure)
    return figure


def _wait_table(groups: dict[str, pl.Series], label: str) -> PageTable:
    shares = (0.1, 0.5, 0.9, 1.0)
    rows = [
        [key, str(len(values)), *(human_duration(value) for value in _quantiles(values, shares))]
        for key, values in groups.items()
    ]
    return PageTable([label, "jobs", "10 %", "median", "90 %", "longest"], rows)


def _wastes(jobs: pl.DataFrame) -> list[Section]:
    """The largest wastes by user and name of the job, with a sufficient request for all jobs of that name."""
    hours = pl.col("elapsed_s") / 3600
    kinds = {
        "CPU hours without work": pl.col("cpus") * hours * (1 - pl.col("cpu_efficiency").clip(0, 1)),
        "GPU hours without work": pl.col("gpus") * hours * (1 - pl.col("gpu_utilization").clip(0, 1)),
        "GiB hours of memory that nothing used": (pl.col("mem_requested_bytes") - pl.col("mem_used_bytes")).clip(0)
        / 2**30
        * hours,
        "Hours of attempts that were lost": pl.col("lost_s") / 3600,
    }
    ended = jobs.filter(pl.col("ended").is_not_null()).with_columns(pl.col("user", "name").fill_null("-"))
    sections = []
    for title, waste in kinds.items():
        groups = (
            ended.with_columns(_waste=waste)
            .filter(pl.col("_waste") > 0)
            .group_by("user", "name")
            .agg(pl.col("_waste").sum(), pl.len().alias("_jobs"))
            .sort("_waste", "user", "name", descending=[True, False, False])
            .head(_MOST_WASTES)
        )
        rows = [
            [row["user"], row["name"], str(row["_jobs"]), f"{row['_waste']:,.1f}",
             *_next_request(ended.filter((pl.col("user") == row["user"]) & (pl.col("name") == row["name"])))]
            for row in groups.to_dicts()
        ]  # fmt: skip
        if rows and sum(float(row[3].replace(",", "")) for row in rows) >= 0.1:
            headers = ("user", "job", "jobs", "hours" if "GiB" not in title else "GiB hours", "next request", "why")
            sections.append(Section(title, table=PageTable(headers, rows, _WASTE_NOTE)))
    return sections


def _largest_share(
    held: int | None, parts: int | None, jobs: Sequence[tuple[float | None, int | None, int | None]]
) -> float | None:
    """The used share of ``held`` if all ``parts`` were as busy as the busiest part of ``jobs`` (share, held, parts)."""
    busy = [share * each / count for share, each, count in jobs if share is not None and each and count]
    return max(busy) * parts / held if busy and held and parts else None


_WASTE_NOTE: Final = "Next request: enough for every job of that name in the period, with the margins of report advise."


def _next_request(jobs: pl.DataFrame) -> tuple[str, str]:
    """Options that would have been enough for all of these jobs, and why; more for jobs out of time or memory."""
    rows = jobs.to_dicts()
    completed = [JobUsage.from_row(row) for row in rows if row["state"] == "COMPLETED"]
    advice: dict[str, Advice] = {}
    if completed:
        last = completed[-1]
        most: dict[str, Any] = {
            name: max((value for one in completed if (value := getattr(one, name)) is not None), default=None)
            for name in ("needed_s", "mem_per_node_bytes")
        }
        # The last job with the busy CPUs of a task, and GPUs of a node, of the job that had most of them.
        cpus = [(one.cpu_efficiency, one.cpus, one.tasks) for one in completed]
        gpus = [(one.gpu_utilization, one.gpus, one.nodes) for one in completed]
        most["cpu_efficiency"] = _largest_share(last.cpus, last.tasks, cpus)
        most["gpu_utilization"] = _largest_share(last.gpus, last.nodes, gpus)
        advice = {one.option: one for one in advise(last._replace(**most))}
    for row in rows:
        if row["state"] in ("TIMEOUT", "OUT_OF_MEMORY"):
            advice |= {one.option: one for one in advise(JobUsage.from_row(row))}
    if not advice:
        return "-", "no smaller request is safe" if completed else "no job of that name completed"
    options = (f"{name}={one.value}" for name, one in advice.items())
    return " ".join(options), "; ".join(one.why for one in advice.values())


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


def measure_load(nodes: Sequence[NodeSamples]) -> list[NodeLoad]:
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


def write_load(
    title: str, lead: str, nodes: Sequence[NodeSamples], folder: Path, *, facts: Mapping[str, str | None]
) -> list[Path]:
    """Write index.html and the pictures (PNG, SVG) of the measured quantities to ``folder``."""
    make_page_folder(folder)
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
        [load_cells(load) for load in measure_load(nodes)],
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
    save_file(folder / "index.html", page)
    return [folder / "index.html", *figures.save({one.name: figure for one, figure in made.items()}, folder)]


def facts_of(entry: Entry) -> dict[str, str | None]:
    """Job, site, partition and its nodes."""
    partition = read_request(Path(entry.run_dir)).partition
    nodes = describe_partition(entry.site, partition)
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


def load_cells(load: NodeLoad) -> tuple[str, ...]:
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
