"""``hpcjobs report jobs``: jobs of the accounting as a table, as sums by group, or as a page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl
from rich.cells import cell_len

from hpcjobs.cli.output import note, print_output, print_table, table_width
from hpcjobs.cli.report import HEADERS, JobColumn
from hpcjobs.cli.terminal import write_document
from hpcjobs.errors import RequestError, UnknownJobError, require_packages
from hpcjobs.jobstats.columns import COLUMNS, JobFilter, format_energy
from hpcjobs.jobstats.derive import joint_energy_source, known_sum
from hpcjobs.jobstats.sources import AccountingTable, gather
from hpcjobs.jobstats.totals import sum_by_group, totals
from hpcjobs.jobstats.usage import JobUsage, advise
from hpcjobs.pages import save_file, save_parquet
from hpcjobs.remote.connection import record_output
from hpcjobs.scheduler.base import State, choose_colour
from hpcjobs.site.library import site_or_cluster
from hpcjobs.units import clock, human_bytes, human_duration

_DROP: Final = ("GOODPUT", "ENERGY", "COST", "GPUS", "CPUS", "WAIT", "USER", "NODES")
"""Columns that a narrow terminal leaves out, in this order; advice is then printed below the table."""
_SHORT_NAME: Final = 16
_GAP: Final = 3
_SHARES: Final = ("cpu_efficiency", "mem_efficiency", "gpu_utilization", "goodput")
_POOR, _GOOD = 0.3, 0.7


def gather_jobs(job_filter: JobFilter, site: str | None) -> AccountingTable:
    """Raises UnknownJobError if jobs were named and none is known."""
    table = gather(job_filter, site=site)
    _print_doubts(table)
    ids, others = job_filter.job_ids, (job_filter.users, job_filter.account, job_filter.states, job_filter.name)
    if ids and table.jobs.is_empty() and not any(others):
        raise UnknownJobError(
            f"the accounting of site {site or site_or_cluster(site).name} has no job {' '.join(ids)}",
            hint="it knows a new job some seconds after its start; --site names another site",
        )
    return table


def print_jobs(frame: pl.DataFrame, attempts: pl.DataFrame, columns: Sequence[JobColumn]) -> None:
    """One row per job with its advice, and the sums over all their attempts."""
    if frame.is_empty():
        print("no jobs")
        return
    _print_rows(frame.to_dicts(), list(columns), are_chosen=[one.header for one in columns] != list(HEADERS))
    print()
    # Sums over jobs, not attempts: only rows of jobs consider checkpoints, and the energy that a monitor measured.
    of_jobs = frame.select(
        joint_energy_source(),
        lost_h=known_sum(pl.col("lost_s")) / 3600,
        energy_kwh=known_sum(pl.col("energy_j")) / 3.6e6,
    )
    print_totals(totals([attempts]).with_columns(of_jobs), ["all"])


def _print_rows(rows: Sequence[Mapping[str, Any]], columns: list[JobColumn], *, are_chosen: bool) -> None:
    """Print the table. On a narrow terminal the usual columns are fewer and shorter, and advice follows below."""
    has_advice = any(one.name == "advice" for one in columns)
    advice = [list(map(str, advise(JobUsage.from_row(row)))) for row in rows] if has_advice else []
    cells = [{one.header: _cell(one.name, row) for one in columns if one.name != "advice"} for row in rows]
    for line, sentences in zip(cells, advice, strict=False):
        line["ADVICE"] = "; ".join(sentences)
    headers, below = [one.header for one in columns], False
    if not are_chosen and _width(headers, cells) > table_width():
        below = True
        headers.remove("ADVICE")
        for texts in cells:
            name = texts["NAME"]
            texts["NAME"] = name if len(name) <= _SHORT_NAME else f"{name[: _SHORT_NAME - 1]}…"
        for header in _DROP:
            if _width(headers, cells) > table_width():
                headers.remove(header)
    names = {one.header: one.name for one in columns}
    styles = [
        {n: colour for n, header in enumerate(headers) if (colour := _colour(names[header], row)) is not None}
        for row in rows
    ]
    print_table(headers, [[line[header] for header in headers] for line in cells], styles=styles)
    if below:
        if any(advice):
            print()
        for row, sentences in zip(rows, advice, strict=True):
            for sentence in sentences:
                line_of_job = f"{row['job_id']}: {sentence}"
                print(*textwrap.wrap(line_of_job, table_width(), break_on_hyphens=False), sep="\n")
        left_out = [one.header for one in columns if one.header not in (*headers, "ADVICE")]
        if left_out:
            text = f"the terminal is too narrow for {', '.join(left_out)}; --columns chooses others"
            note("\n".join(textwrap.wrap(text, table_width() - len("hpcjobs: "))))


def _width(headers: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    widths = (max(len(header), *(cell_len(row[header]) for row in rows)) for header in headers)
    return sum(widths) + _GAP * (len(headers) - 1)


def _cell(name: str, row: Mapping[str, Any]) -> str:
    """The value of a column as text for people; ``-`` where it is not known."""
    value = row[name]
    if name == "goodput" and not (row["attempts"] and row["attempts"] > 1):
        return ""
    if name == "energy_j":
        return format_energy(value, row["energy_source"])
    if name == "cost":
        return format_cost(value, row["currency"])
    if value is None:
        return "-"
    formats: dict[str, Callable[[Any], str]] = {"_s": human_duration, "_bytes": human_bytes}
    if (form := next((form for ending, form in formats.items() if name.endswith(ending)), None)) is not None:
        return form(value)
    return {"real": percent, "time": clock}.get(COLUMNS[name][0], str)(value)


def _colour(name: str, row: Mapping[str, Any]) -> str | None:
    """The colour of a state, and of a share of a requested resource: red below 30 %, yellow below 70 %, then green."""
    if name == "state":
        return choose_colour(State[row["state"]])
    share = row[name] if name in _SHARES else None
    return None if share is None else "red" if share < _POOR else "yellow" if share < _GOOD else "green"


def percent(share: float | None) -> str:
    """``0.934`` -> ``93%``."""
    return "-" if share is None else f"{share:.0%}"


def number(value: float | None, style: str) -> str:
    """The value; ``-`` where it is not known."""
    return "-" if value is None else f"{value:{style}}"


def format_cost(amount: float | None, currency: str) -> str:
    """The amount with two decimals; ``< 0.01 EUR`` for an amount that would round to zero; ``-`` if unknown."""
    if amount is None:
        return "-"
    return f"< 0.01 {currency}" if 0 < amount < 0.005 else f"{amount:.2f} {currency}"


def print_totals(frame: pl.DataFrame, by: Sequence[str]) -> None:
    """One row per group of ``by``."""

    def cells(row: dict[str, Any]) -> list[str]:
        joules = None if row["energy_kwh"] is None else row["energy_kwh"] * 3.6e6
        return [
            *(str(row[name]) for name in by), str(row["jobs"]), str(row["failed"]),
            number(row["cpu_h"], ".2f"), number(row["gpu_h"], ".2f"),
            percent(row["cpu_efficiency"]), percent(row["mem_efficiency"]),
            "-" if row["mean_wait_s"] is None else human_duration(row["mean_wait_s"]),
            number(row["lost_h"], ".2f"), format_energy(joules, row["energy_source"]),
            format_cost(row["cost"], row["currency"]),
        ]  # fmt: skip

    if frame.is_empty():
        print("no jobs")
        return
    headers = [*map(str.upper, by), "JOBS", "FAILED", "CPU H", "GPU H", "CPU", "MEM", "MEAN WAIT", "LOST H", "ENERGY"]
    rows = frame.to_dicts()
    shares = {len(by) + 4: "cpu_efficiency", len(by) + 5: "mem_efficiency"}
    styles = [{n: colour for n, name in shares.items() if (colour := _colour(name, row)) is not None} for row in rows]
    print_table([*headers, "COST"], list(map(cells, rows)), styles=styles)


def print_sums(job_filter: JobFilter, site: str | None, *, by: str, as_json: bool) -> None:
    names = by.split(",")
    if len(names) > 2 or len(set(names)) < len(names):
        raise RequestError(f"--by {by}: one group, or two different ones", hint="--by user,state")
    table = sum_by_group(job_filter, by=names, site=site)
    _print_doubts(table)
    if as_json:
        rows = table.jobs.to_dicts()
        print_output(
            "report jobs --by", [{"by": by, "group": ",".join(row[name] for name in names), **row} for row in rows]
        )
    else:
        print_totals(table.jobs, names)


def _print_doubts(table: AccountingTable) -> None:
    for line in table.notes:
        note(line)
    for doubt in table.doubts:
        note(f"{doubt.rows} doubtful: {doubt.kind}: {'; '.join(doubt.examples[:3])}{' ...' * (doubt.rows > 3)}")


def write_table(frame: pl.DataFrame, *, csv: Path | None, parquet: Path | None) -> None:
    """Write the rows to the files that are named."""
    if csv is not None:
        if str(csv) == "-":
            write_document(frame.write_csv())
        else:
            save_file(csv, frame.write_csv())
            record_output(csv)
    if parquet is not None:
        save_parquet(parquet, frame)
        record_output(parquet)


def write_page(table: AccountingTable, folder: Path, job_filter: JobFilter, site: str | None) -> None:
    require_packages("polars", "matplotlib")
    from hpcjobs.jobstats.pages import write_jobs

    write_jobs(table, folder, job_filter, site=site_or_cluster(site))
    record_output(folder)
    print(f"page {folder / 'index.html'}")
