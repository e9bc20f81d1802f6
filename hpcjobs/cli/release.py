"""``hpcjobs release``."""

from __future__ import annotations

import typer

from hpcjobs.cli.output import Jobs, JobSite, Json, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def release(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Let held jobs start."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control("release", select(jobs, site=site, foreign=True))
    if as_json:
        print_output("release", {"released": ids})
    else:
        print("released " + " ".join(ids))
