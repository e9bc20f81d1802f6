"""``hpcjobs scale``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET

from hpcjobs.cli.completion import complete_program
from hpcjobs.cli.job_options import with_job_options
from hpcjobs.cli.options import EPILOG, ProgramCommand
from hpcjobs.cli.output import CommandLineError, Json, SiteName, note, opt, print_output
from hpcjobs.job.models import JobSpec
from hpcjobs.units import format_count

if TYPE_CHECKING:
    from hpcjobs.scaling.study import Study

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    only=["launcher", "env", "container", "sbatch", "srun", "no_check"],
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
        bool,
        typer.Option(
            "--weak/--strong", help="Constant batch per rank, or constant global batch [strong].", show_default=False
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs of each size.", min=1)] = 3,
    name: Annotated[str | None, opt("--name", "-J", help="Name of the study [the program's].")] = None,
    one_at_a_time: Annotated[bool, typer.Option("--one-at-a-time", help="Each run waits for the one before.")] = False,
    request: JobSpec,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Submit even if the code has changed since the earlier runs.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for all runs; exit code 1 unless every run succeeded.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure PROGRAM at several sizes: submit all runs and return. The same command again submits missing runs.

    With --strong, the --batch-size of PROGRAM is divided by the ranks, so the global batch is constant. With --weak,
    it is the batch size of every rank.
    """
    from pathlib import PurePath

    from hpcjobs.errors import RequestError
    from hpcjobs.scaling import study
    from hpcjobs.scaling.study_sweep import submit_study
    from hpcjobs.site.checks import check_name
    from hpcjobs.site.library import default_site

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
    """Wait for all runs and name those that failed; 0 if there are none."""
    from hpcjobs.cli.progress import wait_for_sweep
    from hpcjobs.scaling.study_sweep import sweep_of

    sweep = sweep_of(study)
    code = wait_for_sweep(sweep)
    for row in sweep.table().rows if code else ():
        if row["state"] != "COMPLETED":
            exit_code = "" if row["exit_code"] is None else f", exit code {row['exit_code']}"
            note(f"job {row['job_id']} {row['state']}{exit_code}; log {row['log']}")
    return code


def _counts(option: str, text: str) -> list[int]:
    counts = text.split(",")
    if not all(count.isdigit() and int(count) > 0 for count in counts):
        raise CommandLineError(f"{option} {text!r}: write counts such as 1,2,4")
    return sorted({int(count) for count in counts})
