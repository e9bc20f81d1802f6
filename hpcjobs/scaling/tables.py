"""An analysis in cells of text, shared by the terminal, the page and the Markdown."""

from __future__ import annotations

from typing import Final

import polars as pl

from hpcjobs.accounting.columns import format_energy
from hpcjobs.scaling.analysis import Analysis, SizeResult
from hpcjobs.scaling.fits import Fit
from hpcjobs.scaling.intervals import Interval
from hpcjobs.units import human_duration

TABLE_NOTE: Final = (
    "Throughput is the geometric mean over runs, with its 95 % interval (Student's t on logarithms); step times, shares"
    " and waits are medians. Shares of a step: communication is what waits for other ranks (exposed), data the wait for"
    " a batch; checkpoint is of the complete run. ~ is modelled from the site's watts."
)
CAPTIONS: Final = {
    "speedup": "Speed-up against the smallest size; the band is the 95 % interval of the law that is used.",
    "efficiency": "Efficiency: speed-up over the ideal one.",
    "breakdown": "Where a step's time goes.",
    "spread": "Each run against the median of its size, by the hosts it ran on, slowest first;"
    " a host that no fast run had is marked.",
}
RUN_HEADERS: Final = ("job", "nodes", "ranks", "repeat", "state", "throughput", "hosts", "source", "run folder")


def sizes(analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    """Headers, and the cells of each size; without columns that were not measured."""
    table = [_cells(group, analysis.unit) for group in analysis.groups]
    known = [header for header in table[0] if any(row[header] != "-" for row in table)]
    return known, [[row[header] for header in known] for row in table]


def _cells(group: SizeResult, unit: str) -> dict[str, str]:
    paid = group.cost_per_million
    return {
        "nodes": str(group.nodes),
        "ranks": str(group.ranks),
        "runs": str(group.runs),
        unit: interval(group.throughput, rate_style(group.throughput.value)),
        "speed-up": interval(group.speedup, ".2f"),
        "efficiency": interval(group.efficiency, ".0%"),
        "step": "-" if group.step_s is None else f"{1e3 * group.step_s:.1f} ms",
        "compute": share(group.compute),
        "comm.": share(group.communication),
        "data": share(group.data_wait),
        "ckpt": share(group.checkpoint),
        "CPU": share(group.cpu_efficiency),
        "GPU": share(group.gpu_utilization),
        "queue wait": "-" if group.queue_wait_s is None else human_duration(group.queue_wait_s),
        "epoch": "-" if group.epoch_s is None else human_duration(group.epoch_s),
        "energy": format_energy(group.energy_j, group.energy_source),
        "cost / 10⁶ samples": "-" if paid is None else f"{paid:.3g} {group.currency}",
    }


def rate_style(value: float) -> str:
    """Thousands apart and no decimals from 100 on, else three digits."""
    return ",.0f" if value >= 100 else ".3g"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def interval(value: Interval, style: str) -> str:
    """``3.61 (3.5 to 3.7)``; the value alone where there is no interval or no width to it."""
    if value.low is None or value.high is None or value.low == value.high:
        return f"{value.value:{style}}"
    return f"{value.value:{style}} ({value.low:{style}} to {value.high:{style}})"


def parameters(analysis: Analysis, fitted: Fit) -> dict[str, Interval]:
    """X(1) and the parameters of a law, with intervals if it is the one used: of a law that does not hold, an interval
    says nothing."""
    values = {f"X(1), {analysis.unit}": fitted.x1, **fitted.parameters}
    return values if fitted is analysis.chosen else {name: Interval(value.value) for name, value in values.items()}


def fit_rows(analysis: Analysis) -> list[list[str]]:
    rows = []
    for fitted in analysis.fits:
        name = fitted.law.name + (" (used)" if fitted is analysis.chosen else "")
        for parameter, (value, low, high) in parameters(analysis, fitted).items():
            style = rate_style(value) if parameter.startswith("X(1)") else ".4g"
            width = "-" if low is None or high is None else f"{low:{style}} to {high:{style}}"
            rows.append([name, parameter, f"{value:{style}}", width, f"{fitted.rms:.1%}"])
    return rows


def run_rows(runs: pl.DataFrame) -> list[list[str]]:
    return [
        [
            row["job_id"], str(row["nodes"]), str(row["ranks"]), str(row["repeat"]), row["state"] or "-",
            "-" if row["throughput"] is None else f"{row['throughput']:{rate_style(row['throughput'])}} {row['unit']}",
            row["node_list"] or "-", row["source"] or "-", row["run_dir"],
        ]
        for row in runs.to_dicts()
    ]  # fmt: skip


def warnings(analysis: Analysis) -> list[str]:
    lines = [f"This study mixes {what}. Its figures do not compare like with like." for what in analysis.mixed]
    if analysis.left_out:
        lines.append(f"Runs without a measurement: {'; '.join(analysis.left_out)}.")
    return lines
