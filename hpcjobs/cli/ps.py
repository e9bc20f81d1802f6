"""``hpcjobs ps``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, clock, note, print_json, print_table

if TYPE_CHECKING:
    from hpcjobs.run.listing import Row

app = typer.Typer(rich_markup_mode=None)

_HEADERS = ["JOB", "NAME", "SITE", "STATE", "NODES", "ELAPSED", "START", "EXIT", "REASON", "RUN FOLDER"]


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All jobs, not only those of the last day.")] = False,
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """My jobs: the last day's and whatever still runs, also jobs submitted by other means."""
    from hpcjobs.run.listing import listing

    rows, errors = listing(since=0.0 if everything else time.time() - 86400, site=site)
    if as_json:
        print_json([row._asdict() for row in rows])
    elif not rows:
        print("no jobs" if everything else "no jobs since yesterday (hpcjobs ps -a lists older ones)")
    else:
        print_table(_HEADERS, map(_cells, rows))
    for error in errors:
        note(str(error))
    if errors:
        raise typer.Exit(errors[0].exit_code)


def _cells(row: Row) -> list[str]:
    from hpcjobs.units import human_duration

    record = row.record
    start = f"~{clock(record.start_estimate)}" if record.start_estimate else clock(record.started)
    exit_code = "-" if record.exit_code is None else str(record.exit_code)
    return [
        record.job_id,
        row.name or "-",
        row.site or "-",
        record.state.value,
        record.node_list or (str(record.nnodes) if record.nnodes else "-"),
        "-" if record.elapsed_s is None else human_duration(record.elapsed_s),
        start,
        exit_code if record.signal is None else f"{exit_code} (signal {record.signal})",
        record.reason or "",
        row.run_dir or "",
    ]
