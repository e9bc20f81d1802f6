"""``hpcjobs cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs, complete_states
from hpcjobs.cli.output import CommandLineError, JobSite, Json, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ids, ranges, run folders or names.", autocompletion=complete_jobs)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All of my jobs that have not ended.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Only jobs in this state: PENDING …", show_default=False, autocompletion=complete_states
        ),
    ] = None,
    signal: Annotated[
        str | None, typer.Option(help="Send this signal to the jobs; do not cancel them: USR1.", show_default=False)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs. A job that has already ended is not an error."""
    from hpcjobs.cli.ps import parse_states
    from hpcjobs.errors import UnknownJobError
    from hpcjobs.run.cancel import cancel
    from hpcjobs.run.listing import select_unfinished
    from hpcjobs.run.select import select
    from hpcjobs.scheduler.base import State

    states = parse_states(state or [])
    if states and not jobs and not everything:
        raise CommandLineError("--state chooses among jobs: add --all, or name jobs")
    if bool(jobs) == everything:
        problem = (
            "JOBS and --all exclude each other" if jobs else "name a job, or use --all; hpcjobs ps lists your jobs"
        )
        raise CommandLineError(problem)
    entries = select_unfinished(site=site) if everything else select(jobs or [], site=site, foreign=True)
    if signal is not None:
        from hpcjobs.run.control import signal as send_signal

        ids = send_signal(entries, signal, only=states or ({State.RUNNING} if everything else ()))
        if as_json:
            print_output("cancel --signal", {"signalled": ids})
        else:
            print(f"{signal} sent to {' '.join(ids) or 'no job'}")
        return
    outcome = cancel(entries, only=states)
    if everything:
        outcome = outcome._replace(ended={}, unknown=[])  # the user did not name them
    if as_json:
        print_output("cancel", outcome)
    else:
        if outcome.cancelled:
            print("cancelled " + " ".join(outcome.cancelled))
        elif everything or state:
            print("nothing to cancel")
        for job_id, ended_state in outcome.ended.items():
            print(f"job {job_id} had ended before: {ended_state.value}")
    if outcome.unknown:
        raise UnknownJobError(f"nothing cancelled: the scheduler does not know job {', '.join(outcome.unknown)}")
