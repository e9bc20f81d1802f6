"""``hpcjobs requeue``."""

from __future__ import annotations

import typer

from hpcjobs.cli.output import Jobs, JobSite, Json, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def requeue(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Put running or ended jobs back into the queue: they start again from the beginning, or their last checkpoint."""
    from hpcjobs.run.control import control
    from hpcjobs.run.select import select

    ids = control("requeue", select(jobs, site=site, foreign=True))
    if as_json:
        print_output("requeue", {"requeued": ids})
    else:
        print("requeued " + " ".join(ids))
