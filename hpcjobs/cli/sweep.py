"""``hpcjobs sweep`` and ``scale``: many runs of one program."""

from __future__ import annotations

import io
import shlex
import sys
from collections import Counter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET

from hpcjobs.cli.arguments import CommandLineError, VerbGroup
from hpcjobs.cli.completion import complete_program, complete_sweeps
from hpcjobs.cli.options import EPILOG, ProgramCommand, with_job_options
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output, print_table
from hpcjobs.cli.progress import wait_for_sweep
from hpcjobs.cli.submit import print_notes
from hpcjobs.cli.terminal import write_document
from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec
from hpcjobs.job.project import refuse_job_name
from hpcjobs.remote.connection import record_output
from hpcjobs.scaling import study
from hpcjobs.site.checks import check_name
from hpcjobs.site.library import default_site
from hpcjobs.units import cell, format_count

if TYPE_CHECKING:
    from hpcjobs.scaling.study import Study
    from hpcjobs.sweeps.results import Results
    from hpcjobs.sweeps.submit import Outcome
    from hpcjobs.sweeps.sweep import Sweep

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class _RunByDefault(VerbGroup):
    """``hpcjobs sweep --set lr=1,2 PROGRAM`` is ``hpcjobs sweep run --set ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        if not incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        run = self.commands["run"]
        return run.shell_complete(run.make_context("run", [], parent=ctx, resilient_parsing=True), incomplete)


sweep_app = typer.Typer(
    cls=_RunByDefault,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Many runs of one program: hpcjobs sweep [run] --set lr=0.1,0.01 [OPTIONS] PROGRAM [ARGS]...",
)
Name = Annotated[str, typer.Argument(help="Name or folder of the sweep.", autocompletion=complete_sweeps)]


@sweep_app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    without=["array", "template", "wrap", "preflight", "spare", "min_nodes", "monitor", "notify", "notify_on"],
    help={
        "name": "Name of the sweep [the program's].",
        "retries": "Start a cell again after: timeout=∞,preempt=∞,…; on.",
    },
)
def run(
    *,
    sets: Annotated[
        list[str] | None,
        opt("--set", help="Values of a parameter: lr=0.1,0.01, or seed=0..9, or NAME=[JSON list]; may be repeated."),
    ] = None,
    file: Annotated[
        Path | None, opt("--sweep", help="YAML file with points, job and limits; options override it.")
    ] = None,
    max_parallel: Annotated[
        int | None, opt("--max-parallel", help="Cells that run at once [no limit but the site's].")
    ] = None,
    pack: Annotated[int | None, opt("--pack", help="Cells per array task [1].")] = None,
    pack_parallel: Annotated[
        int | None, opt("--pack-parallel", help="Cells of an array task that run at once [1].")
    ] = None,
    passing: Annotated[
        str | None, opt("--pass", help="How PROGRAM gets parameters: flags (--lr=0.1), overrides (lr=0.1) or env.")
    ] = None,
    site: SiteName = None,
    request: JobSpec,
    dry_run: Annotated[bool, opt("--dry-run", help="Print the cells; write nothing.")] = False,
    wait: Annotated[bool, opt("--wait", help="Wait for the end; exit code 1 unless every cell succeeded.")] = False,
    as_json: Json = False,
) -> None:
    """Submit one cell per combination, except cells that are done, and return."""
    from hpcjobs.sweeps import spec as written
    from hpcjobs.sweeps.sweep import of_definition

    if not request.no_check:
        refuse_job_name(request.program)
    spec = written.read_spec(file) if file is not None else written.SweepSpec()
    points = written.make_points(spec, sets or [], beside=file.parent if file is not None else None)
    definition = written.define(
        request,
        points,
        site=site,
        spec=None if file is None else written.job_layer(file, spec),
        max_parallel=max_parallel if max_parallel is not None else spec.max_parallel,
        pack=pack if pack is not None else spec.pack or 1,
        pack_parallel=pack_parallel if pack_parallel is not None else spec.pack_parallel or 1,
        passing=_passing(passing) or spec.passing,
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
    )
    print_notes(definition.job)
    sweep = of_definition(definition)
    if dry_run:
        _print_cells(sweep, as_json=as_json)
        return
    _report(sweep, sweep.submit(), as_json=as_json)
    if wait:
        raise typer.Exit(wait_for_sweep(sweep))


def _passing(value: str | None) -> Any:
    if value not in (None, "flags", "overrides", "env"):
        raise CommandLineError(f"--pass {value}: use flags, overrides or env")
    return value


def _print_cells(sweep: Sweep, *, as_json: bool) -> None:
    from hpcjobs.sweeps.cells import command
    from hpcjobs.sweeps.submit import resolve_program

    definition = sweep.definition
    program = resolve_program(definition)
    rows = [(cell.id, shlex.join(command(program, cell))) for cell in definition.cells]
    if as_json:
        print_output("sweep run --dry-run", [{"cell": cell, "command": command} for cell, command in rows])
    else:
        note(f"dry run, nothing written; {format_count(len(rows), 'cell')} in {sweep.path}")
        print_table(["CELL", "COMMAND"], rows)


def _report(sweep: Sweep, outcome: Outcome, *, as_json: bool = False) -> None:
    name, arrays = sweep.definition.name, [entry.job_id for entry in outcome.submitted]
    if as_json:
        facts = {"name": name, "folder": sweep.path, "arrays": arrays}
        print_output("sweep run", outcome._asdict() | facts)
        return
    listed = f", arrays {' '.join(arrays)}" if arrays else ""
    print(f"sweep {name}: {format_count(outcome.cells, 'cell')} submitted{listed}")
    for count, text in (
        (outcome.waiting, "wait for room in the queue; a job of the sweep submits them"),
        (outcome.done, "were done before"),
        (outcome.open, "were queued or running before"),
    ):
        if count:
            print(f"  {count} {text}")
    print(f"folder {sweep.path}\nnext: hpcjobs sweep status {shlex.quote(name)}", flush=True)


@sweep_app.command()
def status(name: Name, as_json: Json = False) -> None:
    """Show how many cells are in each state, and which ones failed."""
    from hpcjobs.sweeps.results import collect_results, state_name
    from hpcjobs.sweeps.sweep import find_sweep

    sweep = find_sweep(name)
    cell_statuses = sweep.cell_statuses()
    counts = Counter(map(state_name, cell_statuses))
    if as_json:
        print_output(
            "sweep status",
            {"name": sweep.definition.name, "folder": str(sweep.path), "states": counts, "total": counts.total()},
        )
        return
    print(f"sweep {sweep.definition.name}: {format_count(counts.total(), 'cell')} in {sweep.path}")
    for state, count in counts.most_common():
        print(f"  {count} {state}")
    bad = [cell_status for cell_status in cell_statuses if cell_status.to_run_again]
    if bad:
        table = collect_results(sweep.folder, bad[:20])
        _print_rows([*table.params, "state", "exit_code", "job_id", "log"], table.rows)
        again = f"hpcjobs sweep resume {shlex.quote(sweep.definition.name)}"
        try:
            sweep.require_resumable()
        except RequestError as error:
            again = f"refused here: {error.message}"
        print(f"{len(bad)} to run again: {again}")


@sweep_app.command()
def resume(
    name: Name,
    wait: Annotated[bool, opt("--wait", help="Wait for the end; exit code 1 unless every cell succeeded.")] = False,
    as_json: Json = False,
) -> None:
    """Submit only the cells that failed or are missing."""
    from hpcjobs.sweeps.sweep import find_sweep

    sweep = find_sweep(name)
    _report(sweep, sweep.resume(), as_json=as_json)
    if wait:
        raise typer.Exit(wait_for_sweep(sweep))


@sweep_app.command()
def results(
    name: Name,
    least: Annotated[str | None, opt("--min", help="The best cell: smallest value of this.")] = None,
    most: Annotated[str | None, opt("--max", help="The best cell: largest value of this.")] = None,
    csv: Annotated[Path | None, opt("--csv", help="Write CSV to this file (- is standard output).")] = None,
    parquet: Annotated[Path | None, opt("--parquet", help="Write Parquet to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Print one row per cell: parameters, state, measured values."""
    from hpcjobs.sweeps.sweep import find_sweep

    table = find_sweep(name).table()
    metric = least or most
    best = table.best(metric, largest=least is None) if metric is not None else None
    if csv is not None:
        _write_csv(table, csv)
    if parquet is not None:
        table.write_parquet(parquet)
        record_output(parquet)
    if (csv is not None or parquet is not None) and not as_json:
        return
    if as_json:
        if metric is None:
            print_output("sweep results", table.as_documents(table.rows))
        else:
            print_output("sweep results --min", None if best is None else table.as_documents([best])[0])
    elif metric is None:
        _print_rows([*table.params, "state", *_leading_columns(table), "elapsed_s", "job_id"], table.rows)
    elif best is None:
        note(f"no completed cell has {metric}")
        raise typer.Exit(1)
    else:
        _print_rows([*table.params, metric, "job_id", "folder"], [best])


def _write_csv(table: Results, path: Path) -> None:
    from hpcjobs.pages import save_file

    text = io.StringIO()
    table.write_csv(text)
    if str(path) == "-":
        write_document(text.getvalue())
        return
    save_file(path, text.getvalue())
    record_output(path)


def _leading_columns(table: Results) -> list[str]:
    """The columns a person wants first; all are in the CSV."""
    first_columns = ("loss", table.loss, "evaluation.accuracy", "throughput.value")
    return [name for name in table.measured if name in first_columns] or table.measured[:6]


def _print_rows(columns: list[str], rows: list[dict[str, Any]]) -> None:
    from hpcjobs.top.text import HEADERS

    headers = [column.upper() if column.endswith("_s") else HEADERS.get(column, column.upper()) for column in columns]
    print_table(headers, ([cell(row.get(c)) for c in columns] for row in rows))


@sweep_app.command()
def cancel(name: Name, as_json: Json = False) -> None:
    """Cancel every array of the sweep. Finished cells stay; `sweep resume` submits the others again."""
    from hpcjobs.sweeps.sweep import find_sweep

    cancelled = find_sweep(name).cancel()
    if as_json:
        print_output("sweep cancel", {"cancelled": cancelled})
    else:
        print("cancelled " + (" ".join(cancelled) or "nothing: no array is in the queue"))


@sweep_app.command("continue", hidden=True)
def continue_(folder: Name) -> None:
    """Submit the cells that had no room in the queue; the sweep's job runs this."""
    from hpcjobs.sweeps import submit
    from hpcjobs.sweeps.sweep import find_sweep

    sweep = find_sweep(folder)
    _report(sweep, submit.submit_waiting(sweep.folder))


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    only=["launcher", "env", "container", "sbatch", "srun", "metric", "no_check"],
    without=["array", "ntasks", "gpus", "gpus_per_task", "ntasks_per_gpu", "monitor"],
)
def scale(
    *,
    program: Annotated[
        list[str],
        typer.Argument(help="As for submit; {nodes} and {ranks} are filled in.", autocompletion=complete_program),
    ],
    site: SiteName = None,
    nodes: Annotated[str, typer.Option("--nodes", "-N", help="Node counts: 1,2,4,8.")] = "1",
    ntasks_per_node: Annotated[
        str, typer.Option(help="Tasks per node: 4, or 1,2,4; where jobs have GPUs, each task has one.")
    ] = "1",
    weak: Annotated[
        bool, opt("--weak/--strong", help="Constant batch per rank, or constant global batch [strong].")
    ] = False,
    over: Annotated[
        list[str] | None,
        opt(
            "--over",
            help="Vary this too, as a series: cpus-per-task=1,2, launcher=srun,mpirun, or a {NAME} of PROGRAM.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each size.", min=1)] = 3,
    name: Annotated[str | None, opt("--name", "-J", help="Name of the study [the program's].")] = None,
    one_at_a_time: Annotated[bool, opt("--one-at-a-time", help="Each run waits for the one before.")] = False,
    request: JobSpec,
    allow_mixed: Annotated[
        bool, opt("--allow-mixed", help="Submit even if the code has changed since the earlier runs.")
    ] = False,
    wait: Annotated[bool, opt("--wait", help="Wait for all runs; exit code 1 unless every run succeeded.")] = False,
    as_json: Json = False,
) -> None:
    """Measure PROGRAM at several sizes: submit all runs and return. The same command again submits missing runs.

    With --strong, the --batch-size of PROGRAM is divided by the ranks, so the global batch is constant. With --weak,
    it is the batch size of every rank.
    """
    from hpcjobs.scaling.study_sweep import submit_study

    if not request.no_check:
        refuse_job_name(program)
    called = name or PurePath(program[0]).stem.replace(".", "-")[:100]
    try:
        check_name(called, "--name" if name else "name of the program")
    except ValueError as error:
        raise RequestError(str(error), hint="--name names the study and its file, NAME.study.json") from error
    resources = {field: getattr(request.resources, field) for field in request.resources.__struct_fields__}
    options: dict[str, Any] = {field: value for field, value in resources.items() if value is not UNSET}
    options |= {} if request.container is None else {"container": request.container}
    options |= {"no_check": True} if request.no_check else {}
    node_counts, task_counts = _counts("--nodes", nodes), _counts("--ntasks-per-node", ntasks_per_node)
    requested = study.Study(
        name=called,
        site=site or default_site(),
        mode="weak" if weak else "strong",
        program=tuple(program),
        sizes=tuple(study.Size(nodes=n, ntasks_per_node=t) for n in node_counts for t in task_counts),
        repeats=repeats,
        options=options,
        launcher=request.launcher,
        env=request.env,
        sbatch=request.sbatch,
        srun=request.srun,
        metric=request.metric,
        axes=dict(map(_axis, over or [])),
        one_at_a_time=one_at_a_time,
    )
    path = study.path_of(called)
    done = submit_study(requested, path, allow_mixed=allow_mixed, report=note)
    if as_json:
        print_output("scale", {"study": str(path.absolute()), "points": done.points})
    else:
        print(f"study {path}: {format_count(len(done.points), 'run')}")
        print(f"next: hpcjobs report scaling {called}", flush=True)
    if wait:
        raise typer.Exit(_wait(done))


def _wait(study: Study) -> int:
    """Wait for all runs and name the failed ones; 0 if all succeeded."""
    from hpcjobs.scaling.study_sweep import sweep_of

    sweep = sweep_of(study)
    code = wait_for_sweep(sweep)
    for row in sweep.table().rows if code else ():
        if row["state"] != "COMPLETED":
            exit_code = "" if row["exit_code"] is None else f", exit code {row['exit_code']}"
            note(f"job {row['job_id']} {row['state']}{exit_code}; log {row['log']}")
    return code


def _axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and values of ``--over cpus-per-task=1,2``."""
    name, equals, values = text.partition("=")
    listed = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not equals or not name or not all(listed):
        raise CommandLineError(f"--over {text!r}: write NAME=VALUE,VALUE")
    if name in ("nodes", "ntasks-per-node", "ntasks_per_node"):
        raise CommandLineError(f"--over {text!r}: --{name.replace('_', '-')} {values} are the sizes of a study")
    return name.replace("-", "_"), listed


def _counts(option: str, text: str) -> list[int]:
    counts = text.split(",")
    if not all(count.isdigit() and int(count) > 0 for count in counts):
        raise CommandLineError(f"{option} {text!r}: write counts such as 1,2,4")
    return sorted({int(count) for count in counts})
