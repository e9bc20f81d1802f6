"""``hpcjobs fabric`` and ``nodes``: the health check, and the nodes that are known to be bad."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hpcjobs
from hpcjobs.cli.arguments import CommandLineError, VerbGroup
from hpcjobs.cli.output import DryRun, Json, SiteName, note, opt, print_output, print_table
from hpcjobs.cli.terminal import write_document
from hpcjobs.units import clock

if TYPE_CHECKING:
    from hpcjobs.job.models import Plan

app = typer.Typer(rich_markup_mode=None, add_completion=False)


fabric_app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False)


NODE_IS_BAD = 19
Partition = Annotated[str | None, opt("--partition", "-p", help="Partition [the site's default].")]
Option = Annotated[list[str] | None, opt("-o", help="Any other sbatch option: -o exclusive.")]


@fabric_app.callback(invoke_without_command=True)
def fabric(
    context: typer.Context,
    site: SiteName = None,
    nodes: Annotated[int | None, opt("--nodes", "-N", help="Nodes.")] = None,
    partition: Partition = None,
    nodelist: Annotated[str | None, opt("--nodelist", "-w", help="These nodes: n[01-04].")] = None,
    cpus_per_task: Annotated[int | None, opt("--cpus-per-task", "-c", help="CPUs to compute with, per node.")] = None,
    time: Annotated[str | None, opt("--time", "-t", help="Time limit [10m].")] = None,
    option: Option = None,
    tolerance: Annotated[
        float | None, opt(help="Allowed fraction below the median of all nodes [0.3].", min=0.0, max=1.0)
    ] = None,
    quick: Annotated[bool, opt("--quick", help="Skip the measurement of collectives.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure every node of an allocation. Exit code 19 if nodes are bad; `submit` then excludes them."""
    if context.invoked_subcommand is not None:
        return
    from hpcjobs.cli.options import sbatch_options
    from hpcjobs.run import fabric as checks

    flags = {"nodes": nodes, "partition": partition, "nodelist": nodelist, "cpus_per_task": cpus_per_task, "time": time}
    options: dict[str, Any] = sbatch_options(option or [], flags)
    command = shlex.join(["hpcjobs", *sys.argv[1:]])
    plan = checks.check_plan(site, tolerance=tolerance, quick=quick, made_by=command, **options)
    code = _run(plan, dry_run=dry_run, quiet=as_json)
    if as_json and not dry_run:
        print_output("fabric", checks.read_report(plan.run_dir))
    raise typer.Exit(code)


@fabric_app.command()
def build(
    site: SiteName = None,
    partition: Partition = None,
    option: Option = None,
    target: Annotated[str, typer.Option(help="cuda, cpu, or auto: what the node has.")] = "auto",
    dry_run: DryRun = False,
) -> None:
    """Compile the CUDA and MPI program on a node, with the site's modules; print its path."""
    from hpcjobs.cli.options import sbatch_options

    if target not in ("auto", "cpu", "cuda"):
        raise CommandLineError(f"--target {target}: use auto, cpu or cuda")

    options: dict[str, Any] = {"nodes": 1, "ntasks_per_node": 1, "time": "10m"} | (
        {"partition": partition} if partition else {}
    )
    plan = hpcjobs.plan(
        ["hpcjobs.fabric.build", target],
        site=site,
        name="fabric-build",
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
        **{**options, **sbatch_options(option or [], {})},
    )
    raise typer.Exit(_run(plan, dry_run=dry_run))


def _run(plan: Plan, *, dry_run: bool, quiet: bool = False) -> int:
    """Submit, print the log as it comes, and give the job's exit code."""
    from hpcjobs.cli.follow import explaining_interrupts, follow_to_end
    from hpcjobs.run import fabric as checks

    if dry_run:
        write_document(plan.script)
        return 0
    handle = hpcjobs.submit(plan)
    with explaining_interrupts([handle.entry]):
        note(f"job {handle.id} on site {plan.job.site}; run folder {plan.run_dir}")
        node = checks.silent_first_node(handle.entry)
    if node is not None:
        checks.give_up(handle.entry, node)
        note(f"bad: {node} did not start the job's script within {checks.SILENT_S:g} s; job {handle.id} is cancelled")
        raise typer.Exit(NODE_IS_BAD)
    if not quiet:
        return follow_to_end(handle)
    with explaining_interrupts([handle.entry]):
        return handle.wait()


@app.command()
def nodes(
    site: SiteName = None,
    clear: Annotated[
        list[str] | None, opt("--clear", help="Remove the results of this node: submit uses it again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the known bad nodes of a site, their measurements, and until when `submit` excludes them."""
    from hpcjobs.fabric.verdict import record_path
    from hpcjobs.job.fault_tolerance import clear_verdicts, read_standings
    from hpcjobs.site.library import default_site, load_site

    name = load_site(site or default_site()).name
    if clear:
        clear_verdicts(name, clear)
        note(f"cleared: {', '.join(clear)}")
        return
    standings = read_standings(name)
    if as_json:
        rows = [standing.last._asdict() | {"left_out_until": standing.avoided_until} for standing in standings.values()]
        print_output("nodes", {"record": str(record_path(name)), "nodes": rows})
        return
    if not standings:
        print(f"no verdicts in {record_path(name)}; hpcjobs fabric gives them")
        return
    table = [
        (node, last.verdict, clock(last.time), last.job_id or "-", clock(until), last.reason)
        for node, (last, _, until) in sorted(standings.items())
    ]
    print_table(["NODE", "VERDICT", "AT", "JOB", "LEFT OUT UNTIL", "WHY"], table)
