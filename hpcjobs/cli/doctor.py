"""``hpcjobs doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.output import SiteName

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    site: SiteName = None,
    run: Annotated[bool, typer.Option("--run", help="Run a job of one task too, and examine its node.")] = False,
) -> None:
    """Examine this installation: versions, site files, Slurm, containers, folders, clock; exit code 0 or 1.

    The text is for a bug report: it has no value of a variable and no name of a user.
    """
    from hpcjobs.discovery.installation import examine, without_names

    is_wrong = False
    for finding in examine(site, run_job=run):
        is_wrong = is_wrong or finding.verdict == "wrong"
        print(f"{finding.subject:12}{finding.verdict:9}{without_names(finding.text)}", flush=True)
    raise typer.Exit(int(is_wrong))
