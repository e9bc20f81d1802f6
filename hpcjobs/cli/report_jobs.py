"""``hpcjobs report jobs``: jobs of the accounting as a table, as sums by group, or as a page."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from hpcjobs.cli.completion import complete_jobs, complete_states
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output, print_table, table_width
from hpcjobs.cli.terminal import raw, write_document
from hpcjobs.errors import RequestError, UnknownJobError, nearest
from hpcjobs.extras import require_packages
from hpcjobs.remote.outputs import record_output
from hpcjobs.units import clock, human_bytes, human_duration

if TYPE_CHECKING:
    import polars as pl

    from hpcjobs.jobstats.columns import JobFilter
    from hpcjobs.jobstats.sources import AccountingTable

_HEADERS: Final = {
    "JOB": "job_id", "NAME": "name", "USER": "user", "STATE": "state", "NODES": "nodes", "CPUS": "cpus", "GPUS": "gpus",
    "WAIT": "queue_wait_s", "ELAPSED": "elapsed_s", "CPU": "cpu_efficiency", "MEM": "mem_efficiency",
    "GOODPUT": "goodput", "ENERGY": "energy_j", "COST": "cost", "ADVICE": "advice",
}  # fmt: skip
"""Header -> column, in the order of the table."""
_MORE_HEADERS: Final = {"GPU": "gpu_utilization", "LIMIT": "time_limit_s", "EXIT": "exit_code"}
_DROP: Final = ("GOODPUT", "ENERGY", "COST", "GPUS", "CPUS", "WAIT", "USER", "NODES")
"""Columns that a narrow terminal leaves out, in this order; advice is then printed below the table."""
_SHORT_NAME: Final = 16
_GAP: Final = 3
_SHARES: Final = ("cpu_efficiency", "mem_efficiency", "gpu_utilization", "goodput")
_POOR, _GOOD = 0.3, 0.7
_WATCH_S: Final = 60.0
"""Between two tables of --watch: each asks slurmdbd."""


def jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Job ids, of any user; without ids the options select jobs.",
            show_default=False,
            autocompletion=complete_jobs,
        ),
    ] = None,
    site: SiteName = None,
    since: Annotated[
        str, typer.Option(help="Jobs that ended since then (7d, 12h, 2026-11-01), or have not ended.")
    ] = "7d",
    until: Annotated[
        str | None, opt("--until", help="Jobs submitted before: 2d, 2026-11-15, 2026-11-15T12:00.")
    ] = None,
    user: Annotated[list[str] | None, opt("--user", "-u", help="Jobs of this user; may be repeated [me].")] = None,
    all_users: Annotated[bool, typer.Option("--all-users", "-a", help="Jobs of all users that sacct shows.")] = False,
    account: Annotated[str | None, opt("--account", "-A", help="Jobs of this account.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Jobs in this state: COMPLETED, FAILED, ...; may be repeated.",
            show_default=False,
            autocompletion=complete_states,
        ),
    ] = None,
    name: Annotated[str | None, opt("--name", "-J", help="Jobs with names of this pattern: 'train-*'.")] = None,
    cluster: Annotated[
        str | None, opt("--cluster", "-M", help="Jobs of other clusters of the site's slurmdbd: a, or a,b.")
    ] = None,
    all_clusters: Annotated[bool, typer.Option("--all-clusters", help="Jobs of all clusters of its slurmdbd.")] = False,
    by: Annotated[
        str | None,
        opt("--by", help="Sums by user, account, partition, qos, state, name or day; two with a comma: user,state."),
    ] = None,
    columns: Annotated[
        str | None, opt("--columns", help="Columns in this order: job,state,elapsed,mem_used_bytes.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print the table again every minute, until Ctrl-C.")] = False,
    as_json: Json = False,
    csv: Annotated[Path | None, opt("--csv", help="Write all columns to this CSV file ('-': print).")] = None,
    parquet: Annotated[Path | None, opt("--parquet", help="Write all columns to this Parquet file.")] = None,
    page: Annotated[
        Path | None, opt("--page", "-O", help="Write a page to this folder: use and waits over time, wastes (HTML).")
    ] = None,
) -> None:
    """Report on jobs from the accounting: waits, efficiencies, energy, cost, and what to request next time."""
    shown = _choose_columns(columns)
    if watch and (as_json or csv or parquet or page):
        raise RequestError("--watch prints a table", hint="leave --json, --csv, --parquet and --page out")
    if by is not None and (columns or csv or parquet or page):
        raise RequestError("--by prints sums", hint="leave --columns, --csv, --parquet and --page out")
    if cluster is not None and all_clusters:
        raise RequestError("--cluster and --all-clusters exclude each other", hint="leave one of them out")
    for path in (csv, parquet, page):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path} cannot be written: there is no folder {path.absolute().parent}")

    def look() -> None:
        job_filter = _make_filter(
            ids, since, until, user, all_users, account, state, name, "all" if all_clusters else cluster
        )
        if not (ids or csv or parquet or page) and _is_without_jobs(site):
            _print_nothing(by, as_json=as_json)
        elif by is not None:
            _print_sums(job_filter, site, by=by, as_json=as_json)
        else:
            require_packages("polars")
            table = _gather(job_filter, site)
            if page is not None:
                _write_page(table, page, job_filter, site)
            if csv is not None or parquet is not None:
                _write_table(table.jobs, csv=csv, parquet=parquet)
            elif as_json:
                print_output("report jobs", table.jobs.to_dicts())
            elif page is None:
                print_jobs(table.jobs, table.attempts, shown)

    while watch:
        print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="", file=raw(sys.stdout))
        print(time.strftime("%F %T"))
        look()
        sys.stdout.flush()
        time.sleep(_WATCH_S)
    look()


def _make_filter(
    ids: list[str] | None, since: str, until: str | None, users: list[str] | None, all_users: bool, account: str | None,
    states: list[str] | None, name: str | None, clusters: str | None,
) -> JobFilter:  # fmt: skip
    from hpcjobs.jobstats.columns import JobFilter, check_states, parse_moment
    from hpcjobs.user import user_name

    first, last = parse_moment("--since", since), None if until is None else parse_moment("--until", until)
    if last is not None and last <= first:
        raise RequestError(f"--until {until} is not after --since {since}")
    check_states("--state", states or ())
    return JobFilter(
        since=first,
        until=last,
        users=tuple(users) if users else None if all_users or ids else (user_name(),),
        account=account,
        states=tuple(states) if states else None,
        name=name,
        job_ids=tuple(ids) if ids else None,
        cluster=clusters,
    )


def _is_without_jobs(site: str | None) -> bool:
    """Whether the site is this machine and no job was ever submitted here; the tables need not be loaded then."""
    from hpcjobs.run import index
    from hpcjobs.site.library import site_or_cluster

    return not site_or_cluster(site).kind.has_accounting and all(entry.kind.has_accounting for entry in index.entries())


def _print_nothing(by: str | None, *, as_json: bool) -> None:
    if as_json:
        print_output("report jobs" if by is None else "report jobs --by", [])
    else:
        print("no jobs")


def _gather(job_filter: JobFilter, site: str | None) -> AccountingTable:
    """Raises UnknownJobError if jobs were named and none is known."""
    from hpcjobs.jobstats.sources import gather
    from hpcjobs.site.library import site_or_cluster

    table = gather(job_filter, site=site)
    _print_doubts(table)
    ids, others = job_filter.job_ids, (job_filter.users, job_filter.account, job_filter.states, job_filter.name)
    if ids and table.jobs.is_empty() and not any(others):
        raise UnknownJobError(
            f"the accounting of site {site or site_or_cluster(site).name} has no job {' '.join(ids)}",
            hint="it knows a new job some seconds after its start; --site names another site",
        )
    return table


class _Column(NamedTuple):
    header: str
    name: str
    """A column of the accounting, or ``advice``."""


def _choose_columns(text: str | None) -> list[_Column]:
    """The columns of the table: headers in any case, or columns of the accounting.

    Raises:
        RequestError: no column of that name.
    """
    from hpcjobs.jobstats.columns import COLUMNS

    if text is None:
        return [_Column(header, name) for header, name in _HEADERS.items()]
    known = _HEADERS | _MORE_HEADERS
    headers = {name: header for header, name in known.items()}
    chosen = []
    for part in (one.strip() for one in text.split(",")):
        name = known.get(part.upper(), part.lower())
        if name not in COLUMNS and name not in headers:
            names = [*(header.lower() for header in known), *COLUMNS]
            raise RequestError(f"--columns {part}: no such column", hint=nearest(part.lower(), names))
        chosen.append(_Column(headers.get(name, name.upper()), name))
    return chosen


def print_jobs(frame: pl.DataFrame, attempts: pl.DataFrame, columns: Sequence[_Column]) -> None:
    """One row per job with its advice, and the sums over all their attempts."""
    import polars as pl

    from hpcjobs.jobstats.derive import joint_energy_source, known_sum
    from hpcjobs.jobstats.totals import totals

    if frame.is_empty():
        print("no jobs")
        return
    _print_rows(frame.to_dicts(), list(columns), are_chosen=[one.header for one in columns] != list(_HEADERS))
    print()
    # Sums over jobs, not attempts: only rows of jobs consider checkpoints, and the energy that a monitor measured.
    of_jobs = frame.select(
        joint_energy_source(),
        lost_h=known_sum(pl.col("lost_s")) / 3600,
        energy_kwh=known_sum(pl.col("energy_j")) / 3.6e6,
    )
    print_totals(totals([attempts]).with_columns(of_jobs), ["all"])


def _print_rows(rows: Sequence[Mapping[str, Any]], columns: list[_Column], *, are_chosen: bool) -> None:
    """Print the table. On a narrow terminal the usual columns are fewer and shorter, and advice follows below."""
    advice = [_advise(row) for row in rows] if any(one.name == "advice" for one in columns) else []
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
    from rich.cells import cell_len

    widths = (max(len(header), *(cell_len(row[header]) for row in rows)) for header in headers)
    return sum(widths) + _GAP * (len(headers) - 1)


def _advise(row: Mapping[str, Any]) -> list[str]:
    from hpcjobs.jobstats.advice import JobUsage, advise

    return list(map(str, advise(JobUsage.from_row(row))))


def _cell(name: str, row: Mapping[str, Any]) -> str:
    """The value of a column as text for people; ``-`` where it is not known."""
    from hpcjobs.jobstats.columns import COLUMNS, format_energy

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
    from hpcjobs.scheduler.base import State, choose_colour

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
    headers = [
        *map(str.upper, by),
        "JOBS",
        "FAILED",
        "CPU H",
        "GPU H",
        "CPU",
        "MEM",
        "MEAN WAIT",
        "LOST H",
        "ENERGY",
        "COST",
    ]
    from hpcjobs.jobstats.columns import format_energy

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


def _print_sums(job_filter: JobFilter, site: str | None, *, by: str, as_json: bool) -> None:
    require_packages("polars")
    from hpcjobs.jobstats.totals import sum_by_group

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


def _write_table(frame: pl.DataFrame, *, csv: Path | None, parquet: Path | None) -> None:
    from hpcjobs.pages import save_csv, save_parquet

    if csv is not None:
        if str(csv) == "-":
            write_document(frame.write_csv())
        else:
            save_csv(csv, frame)
            record_output(csv)
    if parquet is not None:
        save_parquet(parquet, frame)
        record_output(parquet)


def _write_page(table: AccountingTable, folder: Path, job_filter: JobFilter, site: str | None) -> None:
    require_packages("polars", "matplotlib")
    from hpcjobs.jobstats import jobs_page
    from hpcjobs.site.library import site_or_cluster

    jobs_page.write(table, folder, job_filter, site=site_or_cluster(site))
    record_output(folder)
    print(f"page {folder / 'index.html'}")
