"""``hpcjobs hold``."""

from __future__ import annotations

import typer

from hpcjobs.cli.output import Jobs, JobSite, Json, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def hold(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Keep pending jobs from starting, until `hpcjobs release`."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control("hold", select(jobs, site=site, foreign=True))
    if as_json:
        print_output("hold", {"held": ids})
    else:
        print("held " + " ".join(ids))
