"""``hpcjobs update``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs, complete_settings
from hpcjobs.cli.output import JobSite, Json, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


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
    if as_json:
        print_output("update", {"job_id": entry.job_id, "changed": arguments})
    else:
        print(f"job {entry.job_id}: {' '.join(arguments)}")
