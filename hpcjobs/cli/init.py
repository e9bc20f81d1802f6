"""``hpcjobs init``: writes the project file of a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.job_options import with_job_options
from hpcjobs.cli.options import EPILOG, ProgramCommand
from hpcjobs.cli.output import SiteName, note
from hpcjobs.job.models import JobSpec

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options()
def init(
    *,
    site: SiteName = None,
    request: JobSpec,
    force: Annotated[bool, typer.Option("--force", help="Replace hpcjobs.yaml.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file; write nothing.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file, for editors.")] = False,
) -> None:
    """Write hpcjobs.yaml, the job that `hpcjobs submit` runs in this folder: PROGRAM with these options.

    The options of a script's #SBATCH lines are written too.
    """
    from hpcjobs.errors import RequestError
    from hpcjobs.files import write_beside
    from hpcjobs.job import project

    if schema:
        sys.stdout.write(project.schema_text())
        return
    if not request.program:
        raise RequestError("init needs the program that jobs run", hint="hpcjobs init train.py, or init job.sh")
    path = Path(project.FILE).absolute()
    text = project.project_text(request, site)
    if not dry_run:
        if path.exists() and not force:
            raise RequestError(f"{path} exists", hint="edit it, or replace it with --force")
        write_beside(path, text, mode=None)
    print(text, end="", flush=True)
    if not dry_run:
        note(f"wrote {path}; next: hpcjobs submit --dry-run, then hpcjobs submit")
