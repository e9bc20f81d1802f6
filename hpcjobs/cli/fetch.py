"""``hpcjobs fetch``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from hpcjobs.cli.output import JobSite, note

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_LARGE = ("checkpoints", "code")


@app.command()
def fetch(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(help="Id or name of a job [newest].")] = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files of its run folder [all but checkpoints and code].")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to copy to [runs/NAME of the run folder].", show_default=False)
    ] = None,
    site: JobSite = None,
) -> None:
    """On a laptop: copy a run folder, or FILES of it, from the login host. Unchanged files are not copied again."""
    from hpcjobs.cli.from_laptop import find_target
    from hpcjobs.errors import RequestError
    from hpcjobs.jupyter.remote import SharedRemote
    from hpcjobs.remote.laptop import Laptop, choose_place

    for name in files or ():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RequestError(f"{name!r}: files are named from the run folder on, as in logs or metrics.jsonl")
    target = find_target(context.find_root().params.get("remote"), site, verb="fetch")
    if target is None:
        raise RequestError(
            "fetch copies from a login host; this command names none, and run folders of this machine need no copy",
            hint="use --remote SITE or --remote HOST before fetch, or --site with a site that has `login:`",
        )
    laptop = Laptop(target, say=note)
    laptop.connect(with_code=False)
    run_dir = str(SharedRemote(laptop).ask(["show", *([job] if job else []), "--json"])["entry"]["run_dir"])
    folder = to or choose_place(Path("runs"), PurePosixPath(run_dir).name)
    if not files:
        laptop.fetch(run_dir, folder, without=_LARGE)
    for name in files or ():
        laptop.fetch(f"{run_dir}/{name}", choose_place(folder, name))
    print(folder)
