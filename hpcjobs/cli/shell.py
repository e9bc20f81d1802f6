"""``hpcjobs shell`` and ``exec``: within a running job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite

app = typer.Typer(rich_markup_mode=None, add_completion=False)
Node = Annotated[str | None, typer.Option(help="Use this node of the job.", show_default=False)]
Rank = Annotated[int | None, typer.Option(help="Use the node of this rank.", min=0, show_default=False)]


@app.command()
def shell(
    job: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    node: Node = None,
    rank: Rank = None,
    site: JobSite = None,
) -> None:
    """Open a shell on a node of a running job, beside its tasks, with their software and environment."""
    run_within(job, (), node=node, rank=rank, site=site, terminal=sys.stdin.isatty())


def run_within(
    job: str, arguments: tuple[str, ...], *, node: str | None, rank: int | None, site: str | None, terminal: bool
) -> None:
    """Run ``arguments`` (none: a shell) within a job, and end with its exit code."""
    from hpcjobs.processes.programs import run_in_terminal
    from hpcjobs.run.interactive import attach
    from hpcjobs.run.select import select_one

    entry = select_one(job, site=site)
    command = attach(entry, arguments, node=node, rank=rank, terminal=terminal)
    raise typer.Exit(run_in_terminal(command.argv, cwd=command.cwd, env=command.env))


@app.command("exec")
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
