"""``hpcjobs exec``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite
from hpcjobs.cli.shell import Node, Rank, run_within

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def exec_(
    job: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    command: Annotated[list[str], typer.Argument(help="Command and its arguments.")],
    node: Node = None,
    rank: Rank = None,
    site: JobSite = None,
) -> None:
    """Run COMMAND on every node of a running job, beside its tasks: hpcjobs exec 4711 -- nvidia-smi."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    run_within(job, tuple(command), node=node, rank=rank, site=site, terminal=on_terminal)
