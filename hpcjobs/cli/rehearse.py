"""``hpcjobs sandbox``, ``drill`` and ``cloud``."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hpcjobs.cli.arguments import verb_group
from hpcjobs.cli.output import Json, Option, Partition, SiteName, note, opt, print_output, print_table
from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.units import format_count

if TYPE_CHECKING:
    from hpcjobs.cloud.provider import Kind
    from hpcjobs.cloud.section import Cluster
    from hpcjobs.run.drill import DrillVerdict

sandbox_app = verb_group("A real Slurm on this machine: up, status, down, env, add-user.")

_ROOT_HELP = "Folder of the sandbox [$HPCJOBS_SANDBOX_ROOT or /var/lib/hpcjobs-sandbox]."
Root = Annotated[Path | None, opt(help=_ROOT_HELP)]


def _say(line: str) -> None:
    print(f"sandbox: {line}", file=sys.stderr, flush=True)


@sandbox_app.command("up")
def sandbox_up(
    nodes: Annotated[int | None, opt("--nodes", "-N", help="Hosts [4].")] = None,
    cpus_per_node: Annotated[int | None, opt(help="CPUs of each node, as Slurm counts them [8].")] = None,
    gpus_per_node: Annotated[int | None, opt(help="GPUs of each node, as Slurm counts them [0].")] = None,
    like: Annotated[str | None, opt(help="Site, or a cluster's slurm.conf, whose shape and limits it takes.")] = None,
    proctrack: Annotated[str | None, opt(help="ProctrackType: linuxproc or cgroup [linuxproc].")] = None,
    install: Annotated[bool, opt("--install", help="Install missing packages by apt-get.")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Start a cluster of several hosts, with accounting, limits, PMIx and PMI2."""
    from hpcjobs import sandbox

    # SIGTERM ends the command like an error, so that everything it started is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
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
    print(f"next: hpcjobs submit --site {shlex.quote(built.site)} ...")
    print('or, for sbatch, srun and sinfo: eval "$(hpcjobs sandbox env)"')


@sandbox_app.command()
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


@sandbox_app.command("down")
def sandbox_down(root: Root = None) -> None:
    """Remove the sandbox with its jobs, records and hosts. Harmless without a sandbox."""
    from hpcjobs import sandbox
    from hpcjobs.run import status

    current = sandbox.status(root=root)
    if current.state == "up" and current.sandbox is not None:
        try:
            status.keep_accounts(current.sandbox.slurm_conf)
        except SchedulerError as error:
            _say(f"its jobs are known by what they wrote themselves: {error}")
    sandbox.down(root=root, say=_say)
    if current.sandbox is not None:
        status.end_all(current.sandbox.slurm_conf)


@sandbox_app.command("add-user")
def add_user(users: Annotated[list[str], typer.Argument(help="Users of this machine.")], root: Root = None) -> None:
    """Let users submit jobs if their accounts were created after the start of the sandbox."""
    from hpcjobs import sandbox

    sandbox.add_users(users, root=root)
    print(f"sandbox: {', '.join(users)} may submit")


@sandbox_app.command()
def env(root: Root = None) -> None:
    """Print the lines that point Slurm's commands at the sandbox, for eval."""
    from hpcjobs import sandbox

    for name, value in sandbox.environment(root=root).items():
        print(f"export {name}={shlex.quote(value)}")


drill_app = verb_group("Inject a fault into a run and show whether it recovers.")


FAULTS = {
    "timeout": "Let a run reach its time limit.",
    "preempt": "Preempt a run.",
    "kill-rank": "Kill the last rank of a run.",
    "kill-node": "Kill every rank of a run on its last node.",
    "full-disk": "Fill the disk of a run's rank 0 for a while.",
}
_HELP = """

Wait for the recovery, and compare the run with an undisturbed one. Both are ordinary jobs of yours; PROGRAM is a
trainer, with its flags. Exit code 0: the run recovered, and the losses of both are the same.
"""


def _add(fault: str) -> None:
    """``hpcjobs drill FAULT``: the same options for each."""

    @drill_app.command(fault, help=FAULTS[fault] + _HELP, context_settings={"allow_interspersed_args": False})
    def command(
        program: Annotated[list[str] | None, typer.Argument(help="As for submit [a small ddp run].")] = None,
        site: SiteName = None,
        partition: Partition = None,
        nodes: Annotated[int | None, opt("--nodes", "-N", help="Nodes [2; without Slurm 1].")] = None,
        ntasks_per_node: Annotated[
            int | None, opt("--ntasks-per-node", help="Ranks per node [1; without Slurm 2].")
        ] = None,
        launcher: Annotated[
            str | None, opt("--launcher", help="Program that starts the ranks: srun, torchrun … [the site's first].")
        ] = None,
        time: Annotated[str | None, opt("--time", "-t", help="Time limit of both runs [timeout: 1m].")] = None,
        signal_before: Annotated[
            str | None,
            opt("--signal-before", help="Signal the program this long before its time limit [timeout: 20s]."),
        ] = None,
        option: Option = None,
        by: Annotated[
            str | None,
            opt(
                "--by",
                help="Only for preempt: partition of higher priority, whose job takes the nodes [none: SIGTERM].",
            ),
        ] = None,
        at_step: Annotated[int, typer.Option(help="The fault comes at this step.", min=1)] = 40,
        tolerance: Annotated[float, typer.Option(help="Largest relative difference of a loss.")] = 0.0,
        as_json: Json = False,
    ) -> None:
        from hpcjobs.cli.options import sbatch_options
        from hpcjobs.run.drill import drill

        flags = {"partition": partition, "nodes": nodes, "ntasks_per_node": ntasks_per_node, "launcher": launcher,
                "time": time, "signal_before": signal_before}  # fmt: skip
        options = sbatch_options(option or [], flags)
        verdict = drill(
            fault, program or (), site=site, by=by, at_step=at_step, tolerance=tolerance, say=note, options=options
        )
        if as_json:
            print_output("drill", verdict)
        else:
            print("\n".join(_describe(verdict)))
        raise typer.Exit(0 if verdict.passed else 1)


for _fault in FAULTS:
    _add(_fault)


def _describe(verdict: DrillVerdict) -> list[str]:
    same = "identical" if verdict.difference == 0 else f"within {verdict.difference:.2g}"
    lines = [
        f"drill {verdict.fault} on site {verdict.site}: {'PASSED' if verdict.passed else 'FAILED'}",
        f"  fault: {verdict.about}",
        f"  attempts: {verdict.attempts}, {verdict.steps} steps, {verdict.lost} of them done twice",
    ]
    if verdict.resumed_at is not None:
        lines.append(f"  the last one took up step {verdict.resumed_at}")
    if verdict.resume_s is not None:
        lines.append(f"  from the fault to the next step: {verdict.resume_s:.0f} s")
    lines.append(f"  losses of {verdict.losses_compared} lines {same} with those of the run left alone")
    lines += [f"  FAILED: {problem}" for problem in verdict.problems]
    return [*lines, f"  run folder {verdict.run_dir}"]


cloud_app = verb_group("Clusters rented from a site's cloud section: render, check, plan, up, down.")

Folder = Annotated[Path | None, opt("--dir", help="The cluster's folder [~/.local/state/hpcjobs/cloud/SITE].")]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", "-N", help="Worker nodes to have [as many as there are; at first the site's nodes.min]."),
]
Yes = Annotated[bool, opt("--yes", "-y", help="Do not ask.")]


def _cluster(site: str | None) -> Cluster:
    from hpcjobs.cloud.section import resolve_cluster
    from hpcjobs.site.library import default_site, load_site

    return resolve_cluster(load_site(site or default_site()))


@cloud_app.command()
def render(
    site: SiteName = None,
    out: Annotated[Path | None, opt("--out", "-o", help="Folder to write [./SITE].")] = None,
    kind: Annotated[
        str, typer.Option(help="vms: Terraform for virtual machines; toolkit: Google's; soperator: Nebius'.")
    ] = "vms",
) -> None:
    """Write the files with which Terraform, or the provider's own tool, builds the cluster. Nothing is built."""
    from hpcjobs.cloud import render as rendering

    cluster = _cluster(site)
    files = rendering.render(cluster, cast("Kind", kind))
    folder = out or Path(cluster.name if kind == "vms" else f"{cluster.name}-{kind}")
    wheel = rendering.wheel_of(cluster) if kind == "vms" else None
    rendering.write(files, folder, wheel)
    for name in (*files, *([wheel.name] if wheel else [])):
        print(folder / name)


@cloud_app.command()
def check(
    site: SiteName = None,
    folder: Folder = None,
    kind: Annotated[str, typer.Option(help="Kind of the files: vms, toolkit or soperator.")] = "vms",
    as_json: Json = False,
) -> None:
    """Report errors, risks and missing values, and estimate the cost, without network. Exit code 4 on errors."""
    from hpcjobs.cloud import render as rendering
    from hpcjobs.cloud.check import check as checked

    cluster = _cluster(site)
    files = rendering.render(cluster, cast("Kind", kind))
    if folder is not None:
        files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.tf*") if path.is_file()}
        if not files:
            raise RequestError(f"--dir {folder}: no Terraform file is there", hint="`hpcjobs cloud render` writes them")
    report = checked(cluster, files, cast("Kind", kind))
    if as_json:
        print_output("cloud check", report)
    else:
        print_table(["LEVEL", "ABOUT", "FINDING"], [(f.level, f.about, f.text) for f in report.findings])
        cost = report.estimate
        if cost.per_hour is not None:
            hourly = f"{cost.per_hour:.2f} {cost.currency} an hour"
            print(f"estimate, by the site's own prices: {hourly} for {format_count(cost.nodes, 'node')}")
            print(f"  not in it: {', '.join(cost.left_out)}")
        print(f"checked offline against {report.checked_against}")
    raise typer.Exit(4 if report.failed else 0)


@cloud_app.command()
def plan(site: SiteName = None, folder: Folder = None, nodes: Nodes = None) -> None:
    """Show what `up` would build or change."""
    from hpcjobs.cloud import lifecycle

    note(f"planned in {lifecycle.plan(_cluster(site), folder, nodes=nodes)}; hpcjobs cloud up builds it")


@cloud_app.command("up")
def cloud_up(
    site: SiteName = None,
    folder: Folder = None,
    nodes: Nodes = None,
    yes: Yes = False,
    force: Annotated[bool, opt("--force", help="Take nodes away even if jobs are in the queue.")] = False,
    first: Annotated[
        str | None,
        typer.Option("--run", metavar="COMMAND", help="Run `hpcjobs COMMAND` there when it is ready: 'submit ddp'."),
    ] = None,
) -> None:
    """Build the cluster, or change it to match the site file; write its address into your copy of the site file."""
    from hpcjobs.cloud import lifecycle
    from hpcjobs.cloud.lifecycle import HeadNode
    from hpcjobs.cloud.render import wheel_of

    cluster = _cluster(site)
    built = lifecycle.up(cluster, folder, nodes=nodes, confirmed=yes, force=force)
    head = HeadNode(built.ssh, built.folder)
    if (wheel := wheel_of(cluster)) is not None:
        head.deliver(wheel, note)
    lifecycle.print_next_steps(built, note)
    if first is not None:
        raise typer.Exit(head.run_when_ready(["hpcjobs", *shlex.split(first)], note))


@cloud_app.command("down")
def cloud_down(
    site: SiteName = None,
    folder: Folder = None,
    yes: Yes = False,
    force: Annotated[bool, opt("--force", help="Take it down even if jobs run or the queue cannot be read.")] = False,
) -> None:
    """Take the cluster down with its shared filesystem. Refused while jobs are in its queue."""
    from hpcjobs.cloud import lifecycle
    from hpcjobs.cloud.render import default_folder
    from hpcjobs.site.library import default_site

    out = folder or default_folder(Path(site or default_site()).stem)
    lifecycle.down(out, confirmed=yes, force=force)
