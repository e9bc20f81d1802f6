"""``hpcjobs ps``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, clock, note, print_json, print_table

if TYPE_CHECKING:
    from hpcjobs.run.listing import Row
    from hpcjobs.scheduler.base import JobRecord, State

app = typer.Typer(rich_markup_mode=None)

_HEADERS = ["JOB", "NAME", "SITE", "STATE", "NODES", "ELAPSED", "START", "EXIT", "REASON", "RUN FOLDER"]


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All jobs, not only those of the last day.")] = False,
    since: Annotated[
        str | None, typer.Option(help="Jobs submitted at most this long ago: 2h, 7d [1d].", show_default=False)
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Jobs in this state: RUNNING, PENDING …", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-J", help="Jobs of this name.", show_default=False)] = None,
    count: Annotated[
        int | None, typer.Option("-n", min=1, help="The newest N of them.", metavar="N", show_default=False)
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show run folders on a terminal too.")] = False,
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """My jobs: the last day's and whatever still runs, also jobs submitted by other means."""
    from hpcjobs.run.listing import listing

    states = parse_states(state or [])
    rows, errors = listing(since=_first_moment(since, everything=everything), site=site)
    rows = [r for r in rows if (not states or r.record.state in states) and (name is None or r.name == name)]
    rows = rows[-count:] if count is not None else rows
    if as_json:
        print_json([row._asdict() for row in rows])
    elif not rows and (states or name is not None):
        print("no such jobs" if everything or since else "no such jobs since yesterday (-a looks at older ones)")
    elif not rows:
        print("no jobs" if everything or since else "no jobs since yesterday (hpcjobs ps -a lists older ones)")
    else:
        folders = wide or not sys.stdout.isatty()
        print_table(_HEADERS if folders else _HEADERS[:-1], (_cells(row)[: None if folders else -1] for row in rows))
    for error in errors:
        note(str(error))
    if errors:
        raise typer.Exit(errors[0].exit_code)


def parse_states(words: list[str]) -> set[State]:
    """The states that ``words`` name, each in any case; several may be joined by commas."""
    from hpcjobs.errors import RequestError, nearest
    from hpcjobs.scheduler.base import State

    states = set()
    for name in ",".join(words).upper().split(",") if words else []:
        if name not in State.__members__:
            raise RequestError(f"--state {name}: no state of a job", hint=nearest(name, State.__members__))
        states.add(State[name])
    return states


def _first_moment(since: str | None, *, everything: bool) -> float:
    """From when on jobs are listed, in seconds since 1970."""
    from hpcjobs.errors import RequestError
    from hpcjobs.units import walltime_s

    if everything:
        return 0.0
    try:
        return time.time() - (86400 if since is None else walltime_s(since))
    except ValueError as error:
        raise RequestError(f"--since {since}: {error}", hint="say 2h or 7d") from error


def _ending(record: JobRecord) -> str:
    """``3``, ``SIGKILL`` or ``1 (SIGABRT)``; Slurm's code 0 of a job that did not complete is no success."""
    code = str(record.exit_code) if record.exit_code or record.state.value == "COMPLETED" else None
    if record.signal_name is None:
        return code or "-"
    return f"{code} ({record.signal_name})" if code else record.signal_name


def _cells(row: Row) -> list[str]:
    from hpcjobs.units import human_duration

    record = row.record
    start = f"~{clock(record.start_estimate)}" if record.start_estimate else clock(record.started)
    return [
        record.job_id,
        row.name or "-",
        row.site or "-",
        record.state.value,
        record.node_list or (str(record.nnodes) if record.nnodes else "-"),
        "-" if record.elapsed_s is None else human_duration(record.elapsed_s),
        start,
        _ending(record),
        record.reason or "",
        row.run_dir or "",
    ]
