"""``hpcjobs archive``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, print_output
from hpcjobs.remote.outputs import record_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def archive(
    job: Annotated[str, typer.Argument(help="Id, run folder or name.", autocompletion=complete_jobs)],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write [NAME_ID.tar]; .tar.gz and .tar.xz are compressed.", show_default=False),
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Write the run folder of a job that has ended to one tar file, with the checksum of every file."""
    from hpcjobs.run.archive import archive
    from hpcjobs.run.select import select_one
    from hpcjobs.units import format_count, human_bytes

    entry = select_one(job, site=site)
    written = archive(entry, output)
    record_output(written.path)
    if as_json:
        print_output("archive", {"path": str(written.path), "files": written.files, "size_bytes": written.size})
    else:
        files = format_count(written.files, "file")
        print(f"{written.path}  {files}, {human_bytes(written.size)}; sha256sum -c SHA256SUMS checks it")
