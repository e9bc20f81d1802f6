"""``hpcjobs report``: jobs, scaling, advise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.output import Json, SiteName, note, print_json, print_table

if TYPE_CHECKING:
    import polars as pl

    from hpcjobs.report.gather import Gathered, Wanted

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def report() -> None:
    """What came out: jobs as the accounting has them, scaling studies, what to ask for next time."""


def _opt(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@app.command()
def jobs(
    ids: Annotated[list[str] | None, typer.Argument(help="Job ids; none: by the options.", show_default=False)] = None,
    site: SiteName = None,
    since: Annotated[str, typer.Option(help="Ended since: 7d, 12h; and all that have not ended.")] = "7d",
    user: Annotated[list[str] | None, _opt("--user", "-u", help="Of these users [me].")] = None,
    all_users: Annotated[bool, typer.Option("--all-users", "-a", help="Of everybody sacct shows.")] = False,
    account: Annotated[str | None, _opt("--account", "-A", help="Of this account.")] = None,
    state: Annotated[list[str] | None, _opt("--state", help="In this state: COMPLETED, FAILED, ...")] = None,
    name: Annotated[str | None, _opt("--name", "-J", help="With names like this: 'train-*'.")] = None,
    by: Annotated[str | None, _opt("--by", help="Sums by user, account, partition, qos, state, name or day.")] = None,
    as_json: Json = False,
    csv: Annotated[Path | None, _opt("--csv", help="Write all columns to this CSV file ('-': print).")] = None,
    parquet: Annotated[Path | None, _opt("--parquet", help="Write all columns to this Parquet file.")] = None,
) -> None:
    """Jobs as the accounting has them: waits, efficiencies, energy, cost, and what to ask for next time."""
    from hpcjobs.errors import RequestError
    from hpcjobs.report.gather import Wanted, gather, me
    from hpcjobs.report.rows import Doubts
    from hpcjobs.report.sums import moment

    try:
        start = moment(since)
    except ValueError as error:
        raise RequestError(str(error)) from error
    wanted = Wanted(
        since=start,
        users=None if all_users else tuple(user or [me()]),
        account=account,
        states=tuple(state) if state else None,
        name=name,
        job_ids=tuple(ids) if ids else None,
    )
    if by is not None:
        _print_sums(wanted, site, by=by, as_json=as_json, doubts=Doubts())
        return
    found = gather(wanted, site=site)
    _say(found)
    if csv is not None or parquet is not None:
        _write(found.jobs, csv=csv, parquet=parquet)
    elif as_json:
        print_json(found.jobs.to_dicts())
    else:
        _print_jobs(found.jobs)


def _say(found: Gathered) -> None:
    for line in found.notes:
        note(line)
    for doubt in found.doubts:
        note(f"{doubt.rows} doubtful: {doubt.kind}: {'; '.join(doubt.examples[:3])}{' ...' * (doubt.rows > 3)}")


def _write(frame: pl.DataFrame, *, csv: Path | None, parquet: Path | None) -> None:
    if csv is not None:
        sys.stdout.write(frame.write_csv()) if str(csv) == "-" else frame.write_csv(csv)
    if parquet is not None:
        frame.write_parquet(parquet)


_HEADERS = ["JOB", "NAME", "USER", "STATE", "NODES", "CPUS", "GPUS", "WAIT", "ELAPSED", "CPU", "MEM", "GOODPUT",
            "ENERGY", "COST", "ADVICE"]  # fmt: skip


def _print_jobs(frame: pl.DataFrame) -> None:
    from hpcjobs.report.advice import advise
    from hpcjobs.report.totals import totals

    if frame.is_empty():
        print("no jobs")
        return
    rows = frame.to_dicts()
    print_table(_HEADERS, ([*_cells(row), "; ".join(map(str, advise(row)))] for row in rows))
    _print_totals(totals([frame]), "all")


def _cells(job: dict[str, Any]) -> list[str]:
    from hpcjobs.units import human_duration

    def span(value: float | None) -> str:
        return "-" if value is None else human_duration(value)

    energy = "-" if job["energy_j"] is None else f"{job['energy_j'] / 3.6e6:.3g} kWh"
    return [
        job["job_id"],
        job["name"] or "-",
        job["user"] or "-",
        job["state"],
        *(str(job[key] if job[key] is not None else "-") for key in ("nodes", "cpus", "gpus")),
        span(job["queue_wait_s"]),
        span(job["elapsed_s"]),
        percent(job["cpu_efficiency"]),
        percent(job["mem_efficiency"]),
        percent(job["goodput"]) if job["incarnations"] and job["incarnations"] > 1 else "",
        f"~{energy}" if job["energy_source"] == "modelled" else energy,
        "-" if job["cost"] is None else f"{job['cost']:.2f} {job['currency']}",
    ]


def percent(share: float | None) -> str:
    """``0.934`` -> ``93%``."""
    return "-" if share is None else f"{share:.0%}"


def _print_sums(wanted: Wanted, site: str | None, *, by: str, as_json: bool, doubts: Any) -> None:
    from hpcjobs.report.sums import sums

    found = sums(wanted, by=by, site=site)
    _say(found)
    if as_json:
        print_json(found.jobs.to_dicts())
    else:
        _print_totals(found.jobs, by)


def _print_totals(frame: pl.DataFrame, by: str) -> None:
    headers = [by.upper(), "JOBS", "FAILED", "CPU H", "GPU H", "CPU", "MEM", "MEAN WAIT", "LOST H", "ENERGY", "COST"]
    from hpcjobs.units import human_duration

    def cells(row: dict[str, Any]) -> list[str]:
        return [
            str(row[by]), str(row["jobs"]), str(row["failed"]), f"{row['cpu_h']:.2f}", f"{row['gpu_h']:.2f}",
            percent(row["cpu_efficiency"]), percent(row["mem_efficiency"]),
            "-" if row["mean_wait_s"] is None else human_duration(row["mean_wait_s"]),
            f"{row['lost_h']:.2f}", f"{row['energy_kwh']:.3g} kWh", f"{row['cost']:.2f}",
        ]  # fmt: skip

    if frame.is_empty():
        print("no jobs")
        return
    print()
    print_table(headers, map(cells, frame.to_dicts()))
