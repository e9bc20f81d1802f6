"""``hpcjobs logs``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, note, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def logs(
    job: Annotated[str | None, typer.Argument(help="Id, array task, run folder or name [newest].")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only this rank's lines.", show_default=False)] = None,
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """Print what a job printed, and which rank failed first."""
    from hpcjobs.run import logs as job_logs
    from hpcjobs.run.select import newest, select

    entry = select([job], site=site)[0] if job is not None else newest(site=site)
    source = job_logs.follow(entry, rank=rank, report=note) if follow else job_logs.lines(entry, rank=rank)
    if as_json:
        print_json({"job_id": entry.job_id, "files": [str(p) for p in job_logs.paths(entry)], "lines": list(source)})
        return
    if not any(map(os.path.lexists, job_logs.paths(entry))) and not follow:
        note(f"job {entry.job_id} has printed nothing yet ({job_logs.paths(entry)[0]})")
        return
    try:
        for line in source:
            print(line, end="", flush=follow)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
