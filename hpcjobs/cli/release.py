"""``hpcjobs release``."""

from __future__ import annotations

import typer

from hpcjobs.cli.output import Jobs, JobSite, Json, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def release(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Let held jobs start."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control("release", select(jobs, site=site))
    if as_json:
        print_json({"released": ids})
    else:
        print("released " + " ".join(ids))
