"""``hpcjobs sandbox``: a real Slurm on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.arguments import VerbGroup
from hpcjobs.cli.output import Json, print_output
from hpcjobs.units import format_count

app = typer.Typer(
    cls=VerbGroup,
    name="sandbox",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A real Slurm on this machine: up, status, down, env, add-user.",
)

_ROOT_HELP = "Folder of the sandbox [$HPCJOBS_SANDBOX_ROOT or /var/lib/hpcjobs-sandbox]."
Root = Annotated[Path | None, typer.Option(help=_ROOT_HELP, show_default=False)]


def _say(line: str) -> None:
    print(f"sandbox: {line}", file=sys.stderr, flush=True)


def _end_cleanly_when_terminated() -> None:
    """SIGTERM takes the same way out as an error: what was started is removed."""
    import signal

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", help="Hosts [4].", show_default=False)] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option(help="CPUs of each node, as Slurm counts them [8].", show_default=False)
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of each node, as Slurm counts them [0].", show_default=False)
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Site, or a cluster's slurm.conf, whose shape and limits it takes.", show_default=False),
    ] = None,
    proctrack: Annotated[
        str | None,
        typer.Option(help="ProctrackType: linuxproc or cgroup [linuxproc].", show_default=False),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Install missing packages by apt-get.")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Start a cluster of several hosts, with accounting, limits, PMIx and PMI2."""
    from hpcjobs import sandbox

    _end_cleanly_when_terminated()
    if like is not None and ("/" in like or like.endswith((".yaml", ".yml", ".conf"))):
        like = str(Path(like).expanduser().absolute())  # other verbs read it again, in other folders
    shape = sandbox.Shape(
        like=like, nodes=nodes, cpus_per_node=cpus_per_node, gpus_per_node=gpus_per_node, proctrack=proctrack
    )
    built = sandbox.up(shape, root=root, install=install, say=_say)
    if as_json:
        print_output("sandbox up", built)
        return
    print(f"{built.site}: {format_count(len(built.hosts), 'host')}, {built.hosts[0].name} to {built.hosts[-1].name}")
    for name, hosts in built.partitions.items():
        print(f"  partition {name}: {format_count(len(hosts), 'node')}")
    if like is not None and like.endswith(".conf"):
        print('next: eval "$(hpcjobs sandbox env)", then hpcjobs sites init')
        return
    print(f"next: hpcjobs submit --site {built.site} ...")
    print('or, for sbatch, srun and sinfo: eval "$(hpcjobs sandbox env)"')


@app.command()
def status(root: Root = None, as_json: Json = False) -> None:
    """Show whether a sandbox is up and complete (exit code 0), or damaged or down (exit code 1)."""
    from hpcjobs import sandbox

    current = sandbox.status(root=root)
    if as_json:
        print_output("sandbox status", current)
    else:
        print(f"{current.state}: {current.root}")
        for problem in current.problems:
            print(f"  {problem}")
        for name, state in current.nodes.items():
            print(f"  {name} {state}")
    raise typer.Exit(0 if current.state == "up" else 1)


@app.command()
def down(root: Root = None) -> None:
    """Remove the sandbox with all it has: jobs, records, hosts. Harmless when there is none."""
    from hpcjobs import sandbox
    from hpcjobs.errors import SchedulerError
    from hpcjobs.run import farewell

    current = sandbox.status(root=root)
    if current.state == "up" and current.sandbox is not None:
        try:
            farewell.keep_accounts(current.sandbox.slurm_conf)
        except SchedulerError as error:
            _say(f"its jobs are known by what they wrote themselves: {error}")
    sandbox.down(root=root, say=_say)
    if current.sandbox is not None:
        farewell.end_all(current.sandbox.slurm_conf)


@app.command("add-user")
def add_user(users: Annotated[list[str], typer.Argument(help="Users of this machine.")], root: Root = None) -> None:
    """Let users submit jobs if their accounts were created after the start of the sandbox."""
    from hpcjobs import sandbox

    sandbox.add_users(users, root=root)
    print(f"sandbox: {', '.join(users)} may submit")


@app.command()
def env(root: Root = None) -> None:
    """Print the lines that point Slurm's commands at the sandbox, for eval."""
    import shlex

    from hpcjobs import sandbox

    for name, value in sandbox.environment(root=root).items():
        print(f"export {name}={shlex.quote(value)}")
