"""``hpcjobs report jobs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.jobs_table import print_jobs, print_totals
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output
from hpcjobs.cli.report_packages import require_packages
from hpcjobs.cli.terminal import write_document
from hpcjobs.remote.outputs import record_output

if TYPE_CHECKING:
    import polars as pl

    from hpcjobs.accounting.sources import AccountingTable, JobFilter


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
    since: Annotated[str, typer.Option(help="Jobs that ended within this time (7d, 12h), or have not ended.")] = "7d",
    user: Annotated[list[str] | None, opt("--user", "-u", help="Jobs of this user; may be repeated [me].")] = None,
    all_users: Annotated[bool, typer.Option("--all-users", "-a", help="Jobs of all users that sacct shows.")] = False,
    account: Annotated[str | None, opt("--account", "-A", help="Jobs of this account.")] = None,
    state: Annotated[
        list[str] | None, opt("--state", help="Jobs in this state: COMPLETED, FAILED, ...; may be repeated.")
    ] = None,
    name: Annotated[str | None, opt("--name", "-J", help="Jobs with names of this pattern: 'train-*'.")] = None,
    by: Annotated[str | None, opt("--by", help="Sums by user, account, partition, qos, state, name or day.")] = None,
    as_json: Json = False,
    csv: Annotated[Path | None, opt("--csv", help="Write all columns to this CSV file ('-': print).")] = None,
    parquet: Annotated[Path | None, opt("--parquet", help="Write all columns to this Parquet file.")] = None,
) -> None:
    """Report on jobs from the accounting: waits, efficiencies, energy, cost, and what to request next time."""
    require_packages("polars")
    from hpcjobs.accounting.doubts import Doubts
    from hpcjobs.accounting.group_totals import parse_since
    from hpcjobs.accounting.sources import JobFilter, gather
    from hpcjobs.errors import RequestError, UnknownJobError, nearest
    from hpcjobs.scheduler.base import State
    from hpcjobs.site.library import default_site
    from hpcjobs.user import user_name

    try:
        start = parse_since(since)
    except ValueError as error:
        raise RequestError(f"--since {since}: not a time", hint="write how long ago: 7d, 12h or 30m") from error
    for value in state or ():
        if value.upper() not in State.__members__:
            raise RequestError(f"--state {value}: not a job state", hint=nearest(value.upper(), State.__members__))
    for path in (csv, parquet):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    job_filter = JobFilter(
        since=start,
        users=tuple(user) if user else None if all_users or ids else (user_name(),),
        account=account,
        states=tuple(state) if state else None,
        name=name,
        job_ids=tuple(ids) if ids else None,
    )
    if by is not None:
        _print_sums(job_filter, site, by=by, as_json=as_json, doubts=Doubts())
        return
    table = gather(job_filter, site=site)
    _print_doubts(table)
    if ids and table.jobs.is_empty() and not (user or account or state or name):
        raise UnknownJobError(
            f"the accounting of site {site or default_site()} has no job {' '.join(ids)}",
            hint="it knows a new job some seconds after its start; --site names another site",
        )
    if csv is not None or parquet is not None:
        _write_table(table.jobs, csv=csv, parquet=parquet)
    elif as_json:
        print_output("report jobs", table.jobs.to_dicts())
    else:
        print_jobs(table.jobs, table.attempts)


def _print_doubts(table: AccountingTable) -> None:
    for line in table.notes:
        note(line)
    for doubt in table.doubts:
        note(f"{doubt.rows} doubtful: {doubt.kind}: {'; '.join(doubt.examples[:3])}{' ...' * (doubt.rows > 3)}")


def _write_table(frame: pl.DataFrame, *, csv: Path | None, parquet: Path | None) -> None:
    if csv is not None:
        if str(csv) == "-":
            write_document(frame.write_csv())
        else:
            csv.write_text(frame.write_csv(), encoding="utf-8")
            record_output(csv)
    if parquet is not None:
        with parquet.open("wb") as file:  # opened here: an error then names the file
            frame.write_parquet(file)
        record_output(parquet)


def _print_sums(job_filter: JobFilter, site: str | None, *, by: str, as_json: bool, doubts: Any) -> None:
    from hpcjobs.accounting.group_totals import sum_by_group

    table = sum_by_group(job_filter, by=by, site=site)
    _print_doubts(table)
    if as_json:
        print_output("report jobs --by", [{"by": by, "group": row[by], **row} for row in table.jobs.to_dicts()])
    else:
        print_totals(table.jobs, by)
