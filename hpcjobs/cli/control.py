"""``hpcjobs cancel``, ``hold``, ``release``, ``requeue`` and ``update``: they change jobs that were submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.completion import complete_jobs, complete_settings, complete_states
from hpcjobs.cli.output import Jobs, JobSite, Json, opt, print_output
from hpcjobs.errors import UnknownJobError

if TYPE_CHECKING:
    from hpcjobs.run.control import Verb

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ids, ranges, run folders or names.", autocompletion=complete_jobs)
    ] = None,
    everything: Annotated[bool, opt("--all", "-a", help="All of my jobs that have not ended.")] = False,
    state: Annotated[
        list[str] | None, opt("--state", help="Only jobs in this state: PENDING …", autocompletion=complete_states)
    ] = None,
    signal: Annotated[str | None, opt(help="Send this signal to the jobs; do not cancel them: USR1.")] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs. A job that has already ended is not an error."""
    from hpcjobs.cli.jobs import parse_states
    from hpcjobs.run.control import cancel
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


@app.command()
def hold(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Keep pending jobs from starting, until `hpcjobs release`."""
    _control("hold", "held", jobs, site, as_json=as_json)


@app.command()
def release(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Let held jobs start."""
    _control("release", "released", jobs, site, as_json=as_json)


@app.command()
def requeue(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Put running or ended jobs back into the queue: they start again from the beginning, or their last checkpoint."""
    _control("requeue", "requeued", jobs, site, as_json=as_json)


def _control(action: Verb, done: str, jobs: list[str], site: str | None, *, as_json: bool) -> None:
    """Apply ``action`` to the jobs, and print their ids after ``done``."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control(action, select(jobs, site=site, foreign=True))
    if as_json:
        print_output(action, {done: ids})
    else:
        print(f"{done} {' '.join(ids)}")


@app.command()
def update(
    job: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    settings: Annotated[
        list[str],
        typer.Argument(
            help="NAME=VALUE: time=2h, time=+30m, partition=long, nice=100 …", autocompletion=complete_settings
        ),
    ],
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Change options of a pending or running job, as far as Slurm allows it."""
    from hpcjobs.run.control import update
    from hpcjobs.run.select import select_one

    entry = select_one(job, site=site, foreign=True)
    arguments = update(entry, settings)
    changed = entry.job_id if entry.task is None else f"{entry.job_id}_{entry.task}"
    if as_json:
        print_output("update", {"job_id": changed, "changed": arguments})
    else:
        print(f"job {changed}: {' '.join(arguments)}")
