"""``hpcjobs archive``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.output import JobSite, Json, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def archive(
    job: Annotated[str, typer.Argument(help="Id, run folder or name.")],
    output: Annotated[
        Path | None, typer.Option(help="The file [NAME_ID.tar]; .gz and .xz compress it.", show_default=False)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Write the run folder of a job that has ended to one tar file, with the checksum of every file."""
    from hpcjobs.run.archive import archive
    from hpcjobs.run.select import select
    from hpcjobs.units import human_bytes

    (entry,) = select([job], site=site)
    written = archive(entry, output)
    if as_json:
        print_json({"path": str(written.path), "files": written.files, "bytes": written.size})
    else:
        print(f"{written.path}  {written.files} files, {human_bytes(written.size)}; sha256sum -c SHA256SUMS checks it")
