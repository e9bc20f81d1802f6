"""``hpcjobs ps``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_states
from hpcjobs.cli.output import JobSite, Json, note, print_output
from hpcjobs.cli.terminal import raw

if TYPE_CHECKING:
    from hpcjobs.run.listing import Listing
    from hpcjobs.scheduler.base import State

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_WATCH_S = 10.0
"""Between two tables of --watch: each costs the scheduler one query."""


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All jobs, not only those of the last day.")] = False,
    since: Annotated[
        str | None, typer.Option(help="Jobs submitted at most this long ago: 2h, 7d [1d].", show_default=False)
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Jobs in this state: RUNNING, PENDING …", show_default=False, autocompletion=complete_states
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-J", help="Jobs of this name.", show_default=False)] = None,
    count: Annotated[
        int | None, typer.Option("-n", min=1, help="The newest N lines.", metavar="N", show_default=False)
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show run folders on a terminal too.")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="A line for each task of an array.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the table again every 10 seconds, until Ctrl-C.")
    ] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """List my jobs: those of the last day and all that have not ended, also jobs submitted without hpcjobs."""
    from hpcjobs.errors import RequestError
    from hpcjobs.run.listing import Listing, listing

    states = parse_states(state or [])
    if watch and as_json:
        raise RequestError("--watch and --json exclude each other", hint="leave one of them out")

    def look() -> Listing:
        rows, errors = listing(
            since=_first_moment(since, everything=everything),
            site=site,
            ended_elsewhere=everything or since is not None,
        )
        chosen = [r for r in rows if (not states or r.record.state in states) and (name is None or r.name == name)]
        return Listing(chosen, errors)

    def show(jobs: Listing) -> None:
        if jobs.rows:
            _print_rows(jobs, tasks=tasks, count=count, wide=wide)
        elif states or name is not None:
            print("no such jobs" if everything or since else "no such jobs since yesterday (-a looks at older ones)")
        else:
            print("no jobs" if everything or since else "no jobs since yesterday (hpcjobs ps -a lists older ones)")
        for error in jobs.errors:
            note(str(error))

    while watch:
        jobs = look()
        print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="", file=raw(sys.stdout))
        print(time.strftime("%F %T"))
        show(jobs)
        sys.stdout.flush()
        time.sleep(_WATCH_S)
    jobs = look()
    if as_json:
        print_output("ps", jobs.rows[-count:] if count is not None else jobs.rows)
        for error in jobs.errors:
            note(str(error))
    else:
        show(jobs)
    if jobs.errors:
        raise typer.Exit(jobs.errors[0].exit_code)


def _print_rows(jobs: Listing, *, tasks: bool, count: int | None, wide: bool) -> None:
    from hpcjobs.cli.ps_table import make_lines, print_lines

    lines = make_lines(jobs.rows, tasks=tasks)
    print_lines(lines[-count:] if count is not None else lines, folders=wide or not sys.stdout.isatty())


def parse_states(names: list[str]) -> set[State]:
    """The states that ``names`` name, each in any case; several may be joined by commas."""
    from hpcjobs.errors import RequestError, nearest
    from hpcjobs.scheduler.base import State

    states = set()
    for name in ",".join(names).upper().split(",") if names else []:
        if name not in State.__members__:
            raise RequestError(f"--state {name}: not a job state", hint=nearest(name, State.__members__))
        states.add(State[name])
    return states


def _first_moment(since: str | None, *, everything: bool) -> float:
    """From when on jobs are listed, in seconds since 1970."""
    from hpcjobs.errors import RequestError
    from hpcjobs.run.listing import RECENT_S
    from hpcjobs.units import walltime_s

    if everything:
        return 0.0
    try:
        return time.time() - (RECENT_S if since is None else walltime_s(since))
    except ValueError as error:
        raise RequestError(f"--since {since}: not a time", hint="write 2h or 7d") from error
