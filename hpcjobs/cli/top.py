"""``hpcjobs top``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def top(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids, ranges, names, run folders, or a folder of run folders [mine of the last day].",
            autocompletion=complete_jobs,
        ),
    ] = None,
    site: JobSite = None,
) -> None:
    """Watch jobs on a screen: progress, loss, load of the nodes. Keys show logs and causes, cancel jobs, open a shell.

    The scheduler is queried once for all jobs, every 5 seconds, or up to every 60 seconds while nothing changes. Of
    other users' jobs only the run folders are read, if their permissions allow it.
    """
    from hpcjobs.errors import HpcJobsError, RequestError

    if find_spec("textual") is None:
        raise HpcJobsError("the screen needs the package textual", hint="pip install 'hpcjobs[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RequestError(
            "hpcjobs top needs a terminal", hint="hpcjobs ps prints the jobs; hpcjobs ps --watch repeats it"
        )
    from hpcjobs.run.foreign import scheduler_of, site_asked
    from hpcjobs.top.actions import RealActions
    from hpcjobs.top.look import Looker, select_watched
    from hpcjobs.top.screen import TopScreen

    looker = Looker(select_watched(jobs or [], site=site), site=site)
    _, slurm_conf = scheduler_of(site_asked(site))
    screen = TopScreen(looker, looker.look(), RealActions(slurm_conf=slurm_conf))
    error = screen.run()
    if screen.ended_by is not None:  # the terminal is restored: end as a program without a screen does
        os.kill(os.getpid(), screen.ended_by)
    if error is not None:
        raise error
