"""``hpcjobs alloc``, ``shell`` and ``exec``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.options import EPILOG, ProgramCommand, with_job_options
from hpcjobs.cli.output import JobSite, SiteName, note
from hpcjobs.job.models import JobSpec

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    without=[
        "array",
        "retries",
        "signal_before",
        "wrap",
        "snapshot",
        "preflight",
        "spare",
        "min_nodes",
        "metric",
        "monitor",
        "notify",
        "notify_on",
    ]
)
def alloc(
    *,
    site: SiteName = None,
    request: JobSpec,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with values of these options; options given here override it.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; write nothing.")] = False,
) -> None:
    """Allocate nodes now, and run PROGRAM or a shell on the first node, with the site's software.

    In the shell, `ranks PROGRAM` starts PROGRAM as the tasks of a job, with RANK, WORLD_SIZE and related variables.
    """
    from hpcjobs.job.plan import plan_of, resolve_request, run_dir_of
    from hpcjobs.processes.programs import run_in_terminal
    from hpcjobs.run.steps import Command, allocate

    # Named bash or interactive, Lightning would not take it for a Slurm job.
    named = replace(request, program=request.program or ("bash",), name=request.name or "alloc")
    job = resolve_request(named, site, spec=spec or (), settings_of="salloc")
    plan = plan_of(job, run_dir_of(job), made_by=shlex.join(["hpcjobs", *sys.argv[1:]]))
    if dry_run:
        print(plan.script, end="")
        return
    arguments = plan.job.argv if request.program else ()

    def run(command: Command) -> int:
        note(f"run folder {plan.run_dir}, removed at the end if it is empty but for files of hpcjobs")
        return run_in_terminal(command.argv, cwd=command.cwd, env=command.env)

    raise typer.Exit(allocate(plan, arguments, terminal=sys.stdin.isatty(), run=run))


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
    from hpcjobs.run.select import select_one
    from hpcjobs.run.steps import attach

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
