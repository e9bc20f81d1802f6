"""``hpcjobs requeue``."""

from __future__ import annotations

import typer

from hpcjobs.cli.output import Jobs, JobSite, Json, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def requeue(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Put running or ended jobs back into the queue: they start again from the beginning, or their last checkpoint."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control("requeue", select(jobs, site=site))
    if as_json:
        print_json({"requeued": ids})
    else:
        print("requeued " + " ".join(ids))
