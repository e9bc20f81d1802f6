"""``hpcjobs cancel``."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def cancel(
    jobs: Annotated[list[str], typer.Argument(help="Ids, ranges, run folders or names.")],
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs; one that has ended already is no error."""
    from hpcjobs.run.attempts import current_id
    from hpcjobs.run.select import select
    from hpcjobs.run.status import own_ids
    from hpcjobs.scheduler.connect import connect

    entries = sorted(select(jobs, site=site), key=lambda entry: (entry.scheduler, entry.slurm_conf or ""))
    cancelled = []
    for (kind, conf), group in groupby(entries, key=lambda entry: (entry.scheduler, entry.slurm_conf)):
        ids = [own_ids(entry)[0] if entry.task is not None else current_id(entry) for entry in group]
        connect(kind, conf).cancel(ids)
        cancelled += ids
    if as_json:
        print_json({"cancelled": cancelled})
    else:
        print("cancelled " + " ".join(cancelled))
