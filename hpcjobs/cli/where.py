"""``hpcjobs where``.

Annotations are values here and not text, which Typer would have to compile at each start.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.job_options import with_job_options
from hpcjobs.cli.options import EPILOG, ProgramCommand
from hpcjobs.cli.output import AnySite, Json, print_output
from hpcjobs.job.models import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcjobs.job.models import Layer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options()
def where(
    *,
    site: AnySite = None,
    request: JobSpec,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with values of these options; options given here override it.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show for each site and partition whether PROGRAM fits, when it would start, and what it costs at most."""
    from hpcjobs.cli.placement_table import print_placements
    from hpcjobs.diagnosis.placement import find_placements, known_sites
    from hpcjobs.job.project import with_project
    from hpcjobs.site.library import load_site

    layers: Sequence[Layer] | Path = spec or ()
    if spec is None:
        request, layers, _ = with_project(request)
    sites = [load_site(site)] if site is not None else known_sites()
    rows = find_placements(request, sites, spec=layers)
    if as_json:
        print_output("where", rows)
    else:
        print_placements(rows)
    if not any(row.is_valid for row in rows):
        raise typer.Exit(5)
