"""``hpcjobs cancel``."""

from __future__ import annotations

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
    from hpcjobs.errors import UnknownJobError
    from hpcjobs.run.cancel import cancel
    from hpcjobs.run.select import select

    outcome = cancel(select(jobs, site=site))
    if as_json:
        print_json({"cancelled": outcome.cancelled, "ended": outcome.ended, "unknown": outcome.unknown})
    else:
        if outcome.cancelled:
            print("cancelled " + " ".join(outcome.cancelled))
        for job_id, state in outcome.ended.items():
            print(f"job {job_id} had ended before: {state.value}")
    if outcome.unknown:
        raise UnknownJobError(f"nothing cancelled: the scheduler does not know job {', '.join(outcome.unknown)}")
