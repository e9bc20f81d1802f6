"""``hpcjobs fabric`` and ``nodes``: the health check, and the nodes that are known to be bad."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import hpcjobs
from hpcjobs.cli.arguments import CommandLineError, VerbGroup
from hpcjobs.cli.output import DryRun, Json, Option, Partition, SiteName, note, opt, print_output, print_table
from hpcjobs.cli.terminal import write_document
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.fabric.verdict import BAD, NodeVerdict, append, record_path
from hpcjobs.job.fault_tolerance import check_words, clear_verdicts, read_standings
from hpcjobs.job.models import Plan
from hpcjobs.record import STATE
from hpcjobs.record.fabric import FABRIC, FabricReport
from hpcjobs.run.index import Entry
from hpcjobs.run.status import Connect, is_queued
from hpcjobs.runtime.dist import first_host
from hpcjobs.scheduler.base import State, connect
from hpcjobs.site.library import default_site, load_site
from hpcjobs.units import clock

app = typer.Typer(rich_markup_mode=None, add_completion=False)


fabric_app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False)


NODE_IS_BAD = 19


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

    if dry_run and as_json:
        raise RequestError("--dry-run and --json exclude each other", hint="--dry-run prints the job script")
    flags = {"nodes": nodes, "partition": partition, "nodelist": nodelist, "cpus_per_task": cpus_per_task, "time": time}
    options: dict[str, Any] = sbatch_options(option or [], flags)
    command = shlex.join(["hpcjobs", *sys.argv[1:]])
    plan = check_plan(site, tolerance=tolerance, quick=quick, made_by=command, **options)
    code = _run(plan, dry_run=dry_run, quiet=as_json)
    if as_json and not dry_run:
        print_output("fabric", read_report(plan.run_dir))
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

    if dry_run:
        write_document(plan.script)
        return 0
    handle = hpcjobs.submit(plan)
    with explaining_interrupts([handle.entry]):
        note(f"job {handle.id} on site {plan.job.site}; run folder {plan.run_dir}")
        node = silent_first_node(handle.entry)
    if node is not None:
        give_up(handle.entry, node)
        note(f"bad: {node} did not start the job's script within {SILENT_S:g} s; job {handle.id} is cancelled")
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


LIMIT = "10m"
SILENT_S = 30.0
_LOOK_S, _ASK_S = 0.5, 15.0


def check_plan(
    site: str | None, *, tolerance: float | None = None, quick: bool = False, made_by: str, **resources: Any
) -> Plan:
    """The job that checks ``nodes`` of ``site``; ``resources`` as of `plan`."""
    from hpcjobs.job.plan import plan

    where = load_site(site or default_site())
    cpus = resources.get("cpus_per_task", where.defaults.cpus_per_task)
    arguments = ["hpcjobs.fabric.check", *check_words(where, cpus_per_task=cpus)]
    arguments += ["--quick"] if quick else []
    arguments += ["--tolerance", str(tolerance)] if tolerance is not None else []
    # Nodes that are left out elsewhere are checked here: this is how a repaired node is recognised.
    options: dict[str, Any] = {"time": LIMIT, "ntasks_per_node": 1, "exclude": None, **resources}
    return plan(arguments, site=where, name="fabric", template="fabric", container="none", made_by=made_by, **options)


def silent_first_node(
    entry: Entry,
    *,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until the job's script starts (None), or its node does not respond: that node.

    The job's first node checks all other nodes. If the first node is cut off and never gets the script, Slurm shows
    the job as running, and starts it again and again.
    """
    scheduler = connect(entry.scheduler, entry.slurm_conf)
    begun = Path(entry.run_dir) / STATE
    node, since, last_query = None, 0.0, -_ASK_S
    while not begun.exists():
        now = clock()
        if now - last_query >= _ASK_S:
            last_query = now
            record = next((each for each in scheduler.queue() if is_queued(entry, [each])), None)
            if record is None:
                return None
            if node is None and record.state is not State.PENDING and record.node_list:
                node, since = first_host(record.node_list), now
        if node is not None and now - since >= SILENT_S:
            return node
        pause(_LOOK_S)
    return None


def give_up(entry: Entry, node: str) -> None:
    """Cancel the check, and remember why."""
    connect(entry.scheduler, entry.slurm_conf).cancel([entry.job_id])
    reason = f"did not start the job's script within {SILENT_S:g} s"
    verdict = NodeVerdict(node, BAD, time.time(), reason, entry.job_id)
    append(record_path(entry.site), [verdict])


def read_report(run_dir: Path) -> FabricReport:
    """Read the report of the check in this run folder. Raises HpcJobsError: it did not come to its end."""
    path = run_dir / FABRIC
    try:
        return FabricReport.read(run_dir)
    except FileNotFoundError as error:
        raise HpcJobsError(f"the check wrote no {path}", hint=f"its log is in {run_dir / 'logs'}") from error
    except ValueError as error:
        raise HpcJobsError(f"{path}: {error}") from error
