"""``hpcjobs submit`` and ``init``.

Annotations are values here, not text, because Typer would compile text at each start.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

import hpcjobs
from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.options import EPILOG, ProgramCommand, with_job_options
from hpcjobs.cli.output import DryRun, Json, SiteName, SpecFile, note, opt, print_output, print_table
from hpcjobs.cli.terminal import write_document
from hpcjobs.errors import RequestError, SchedulerError, require_packages
from hpcjobs.files import write_beside
from hpcjobs.job.models import JobSpec
from hpcjobs.job.program import print_trainer_help
from hpcjobs.site.library import PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcjobs.job.models import Job, Layer, Plan
    from hpcjobs.run.submit import JobHandle
    from hpcjobs.scaling.size_choice import SizeAnswer

_Budget = Annotated[
    str | None, opt("--budget", help="Most that trials of -N auto cost: 5% of the run, or node-hours [5%].")
]
_MinEfficiency = Annotated[
    float | None, opt("--min-efficiency", help="Least efficiency of the size that -N auto chooses [0.8].")
]
_FinishBy = Annotated[
    str | None, opt("--finish-by", help="With -N auto: the cheapest size that ends by 18:00, a date, or in 8h.")
]

LOG_OR_JSON = "--follow and --json exclude each other: the log is no JSON; --wait waits for the end too"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    help={"launcher": "Program that starts the ranks: srun, torchrun, mpirun …, or auto [the site's first]."}
)
def submit(
    *,
    site: SiteName = None,
    request: JobSpec,
    auto: tuple[str, ...] = (),
    budget: _Budget = None,
    min_efficiency: _MinEfficiency = None,
    finish_by: _FinishBy = None,
    spec: SpecFile = None,
    after: Annotated[
        list[str] | None,
        opt(
            help="Start after this job has succeeded; JOB+10m: 10 minutes after its start.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    after_any: Annotated[
        list[str] | None, opt(help="Start after this job has ended, with success or not.", autocompletion=complete_jobs)
    ] = None,
    after_fail: Annotated[
        list[str] | None, opt(help="Start after this job has failed.", autocompletion=complete_jobs)
    ] = None,
    dry_run: DryRun = False,
    test_only: Annotated[bool, opt("--test-only", help="Ask Slurm when the job would start; submit nothing.")] = False,
    explain: Annotated[bool, opt("--explain", help="Print each value and where it was read.")] = False,
    parsable: Annotated[bool, opt("--parsable", help="Print only the job id, as sbatch does.")] = False,
    wait: Annotated[bool, opt("--wait", "-W", help="Wait for the end; exit code of the job.")] = False,
    follow: Annotated[
        bool, opt("--follow", "-f", help="Print the log while the job runs, then end as --wait does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit PROGRAM. Options come before PROGRAM; everything after it is passed to PROGRAM.

    Without PROGRAM, or with NAME in its place, submit the job, or the job NAME, of the file hpcjobs.yaml.
    Values that no option sets come from the site file, then from Slurm's defaults.
    """
    from hpcjobs.job.plan import refuse_options_after_program
    from hpcjobs.job.project import with_project

    if print_trainer_help(request.program):
        return
    if follow and as_json:
        raise CommandLineError(LOG_OR_JSON)
    layers: Sequence[Layer] | Path | None = spec
    if spec is None:
        request, layers = with_project(request)
    jobs = {"afterok": after, "afterany": after_any, "afternotok": after_fail}
    with_dependencies = _with_dependencies(request, jobs, site, is_dry=dry_run or explain)
    made_by = shlex.join(["hpcjobs", *sys.argv[1:]])
    answer: SizeAnswer | None = None
    if auto:
        answer, layers = _find_size(
            auto, with_dependencies, layers, site, budget=budget, min_efficiency=min_efficiency, finish_by=finish_by,
            made_by=made_by, tries=not (dry_run or explain or test_only),
        )  # fmt: skip
        if answer.next_trial is not None:
            if as_json:
                print_output("submit -N auto --dry-run, before its trials", answer)
            return
    elif any(value is not None for value in (budget, min_efficiency, finish_by)):
        raise CommandLineError(
            "--budget, --min-efficiency and --finish-by need -N auto, or another option that is auto"
        )
    plan = hpcjobs.plan(with_dependencies, site, spec=layers, made_by=made_by, allow_untrusted=dry_run or explain)
    # A batch script may hold these too.
    parsable, wait = parsable or "parsable" in plan.job.sources, wait or "wait" in plan.job.sources
    if parsable and as_json:
        raise CommandLineError("--parsable and --json exclude each other")
    if not (dry_run or explain):
        refuse_options_after_program(plan.job)
    print_notes(plan.job)
    if explain and not (dry_run and as_json):  # the plan's own JSON has the sources too
        _print_sources(plan, as_json=as_json)
    if dry_run or explain:
        if dry_run:
            print_plan(plan, as_json=as_json)
        return
    if test_only or "test_only" in plan.job.sources:
        raise typer.Exit(_print_start(plan, as_json=as_json))
    handle = hpcjobs.submit(plan, prepare=_prepare(answer))
    if plan.job.rehearsal:
        note(f"rehearsal: the sandbox on this machine plays site {plan.job.site}")
    if parsable:
        print(handle.id, flush=True)
    else:
        report(handle, plan, as_json=as_json, size=answer)
    if wait or follow:
        from hpcjobs.cli.follow import follow_to_end, wait_for

        raise typer.Exit(follow_to_end(handle) if follow else wait_for([handle.entry]))


def _print_start(plan: "Plan", *, as_json: bool) -> int:
    """Print when the job would start and its greatest cost; return the exit code, 7 if Slurm refuses the job."""
    from hpcjobs.cli.why import print_placements
    from hpcjobs.diagnosis.placement import place
    from hpcjobs.site.library import load_site

    row = place(plan.job, load_site(plan.job.site_file))
    if as_json:
        print_output("submit --test-only", row)
    else:
        print_placements([row])
    return 0 if row.is_valid else SchedulerError.exit_code


def print_notes(job: "Job") -> None:
    """Print notes on the job before it is submitted."""
    from hpcjobs.job.plan import notes

    for line in notes(job):
        note(line)


def _with_dependencies(
    request: JobSpec, jobs: dict[str, list[str] | None], site: str | None, *, is_dry: bool
) -> JobSpec:
    """``request`` that depends on ``jobs`` too, by kind; they must be jobs of the same site."""
    named = {kind: arguments for kind, arguments in jobs.items() if arguments}
    if not named:
        return request
    from hpcjobs.run.select import dependency_on, require_possible
    from hpcjobs.site.library import default_site

    typed = request.resources.dependency
    added = dependency_on(named, site=site or default_site())
    if not is_dry:
        require_possible(named, site=site or default_site())
    dependency = ",".join(filter(None, (typed if isinstance(typed, str) else None, added)))
    return replace(request, resources=replace(request.resources, dependency=dependency))


def _print_sources(plan: "Plan", *, as_json: bool) -> None:
    job = plan.job
    values = {field: getattr(job.resources, field) for field in job.resources.__struct_fields__}
    values |= {field: getattr(job, field) for field in ("name", "launcher", "template", "chdir")}
    affinity = job.affinity
    values |= {f"affinity.{field}": getattr(affinity, field) for field in affinity.__struct_fields__}
    values["container"] = job.container.image if job.container else None
    values |= {f"env.{key}": value for key, value in job.env.items()}
    site = f"site {job.site} ({job.site_file})"
    rows = [
        (key, str(value), job.sources.get(key, site if key.startswith("env.") else "default"))
        for key, value in values.items()
        if value is not None
    ]
    if as_json:
        print_output(
            "submit --explain", [{"name": name, "value": value, "source": source} for name, value, source in rows]
        )
        return
    print_table(["SETTING", "VALUE", "FROM"], rows)


def print_plan(plan: "Plan", *, as_json: bool) -> None:
    """Print the script and the command of a submission."""
    from hpcjobs.job.plan import script_by_hand

    script = script_by_hand(plan)
    if as_json:
        print_output("submit --dry-run", plan._replace(script=script))
        return
    note(f"dry run, nothing written; would create {plan.run_dir} and run: {shlex.join(plan.command)}")
    if plan.job.untrusted:
        sys.stdout.write(script)
    else:
        write_document(script)


def _find_size(
    axes: tuple[str, ...], request: JobSpec, layers: "Sequence[Layer] | Path | None", site: str | None, *,
    budget: str | None, min_efficiency: float | None, finish_by: str | None, made_by: str, tries: bool,
) -> "tuple[SizeAnswer, list[Layer]]":  # fmt: skip
    """The size for the options that are ``auto``, and the layers of the run with it.

    Raises RequestError: an option is wrong, or no size was found.
    """
    from hpcjobs.job.plan import read_layers

    require_packages("numpy", "scipy", purpose="a size of auto")
    from hpcjobs.scaling import auto_size, size_choice

    if min_efficiency is not None and not 0 < min_efficiency < 1:
        raise RequestError(
            f"--min-efficiency {min_efficiency:g} is not allowed", hint="a share between 0 and 1, as 0.8"
        )
    known = read_layers(layers or ())
    goal = auto_size.Goal(
        axes,
        budget=auto_size.TrialBudget() if budget is None else auto_size.TrialBudget.parse(budget),
        min_efficiency=min_efficiency or 0.8,
        finish_by=None if finish_by is None else auto_size.parse_finish(finish_by),
    )
    bench = auto_size.QueueBench(request, known, site, made_by, note, {})
    answer = auto_size.find_size(goal, bench, report=note, tries=tries)
    for line in size_choice.describe_answer(answer):
        note(line)
    return answer, [*known, size_choice.layer_of(answer)]


def _prepare(answer: "SizeAnswer | None") -> "Callable[[Plan], None] | None":
    """Return the files that are added to the run folder before the job is submitted."""
    if answer is None:
        return None
    from hpcjobs.scaling.size_choice import remember

    return remember(answer)


def report(handle: "JobHandle", plan: "Plan", *, as_json: bool, size: "SizeAnswer | None" = None) -> None:
    """Print the submitted job and the next command."""
    if as_json:
        print_output("submit", {"job_id": handle.id, "cluster": handle.entry.cluster, "site": plan.job.site,
                    "run_dir": str(handle.run_dir), "name": plan.job.name, "size": size})  # fmt: skip
        return
    print(f"job {handle.id}  {plan.job.name} on site {plan.job.site}")
    print(f"run folder {handle.run_dir}")
    print(f"next: hpcjobs logs -f {handle.id}", flush=True)  # before the lines of waiting, also on a pipe


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options()
def init(
    *,
    site: SiteName = None,
    request: JobSpec,
    force: Annotated[bool, opt("--force", help="Replace hpcjobs.yaml.")] = False,
    dry_run: Annotated[bool, opt("--dry-run", help="Print the file; write nothing.")] = False,
    schema: Annotated[bool, opt("--schema", help="Print the JSON Schema of the file, for editors.")] = False,
) -> None:
    """Write hpcjobs.yaml, the job that `hpcjobs submit` runs in this folder: PROGRAM with these options.

    The options of a script's #SBATCH lines are written too. The job is checked as `hpcjobs submit` checks it.
    """
    from hpcjobs.job import project
    from hpcjobs.job.limits import DoesNotFitError
    from hpcjobs.job.plan import refuse_options_after_program
    from hpcjobs.site.library import site_to_look_at

    if schema:
        sys.stdout.write(project.schema_text())
        return
    if not request.program and request.wrap is None:
        raise RequestError("init needs the program that jobs run", hint="hpcjobs init train.py, or init job.sh")
    path = Path(PROJECT_FILE).absolute()
    if path.exists() and not (force or dry_run):
        is_misplaced = "--force" in request.program[1:]
        hint = "write --force before the program" if is_misplaced else "edit it, or replace it with --force"
        raise RequestError(f"{path} exists", hint=hint)
    text = project.project_text(request, site)
    layers = project.layers_of_text(text, path)
    try:
        plan = hpcjobs.plan(JobSpec(), site, spec=layers, made_by="hpcjobs submit", allow_untrusted=dry_run)
    except DoesNotFitError as error:
        default = site_to_look_at(None)
        if site is not None or default is None or default.kind.has_nodes:
            raise
        submit = "hpcjobs submit --site NAME"
        note(f"{error.message}\nname the cluster that runs it: {submit}")
    else:
        submit = "hpcjobs submit"
        refuse_options_after_program(plan.job)
        print_notes(plan.job)
    if not dry_run:
        write_beside(path, text, mode=None)
    print(text, end="", flush=True)
    if not dry_run:
        note(f"wrote {path}; next: {submit} --dry-run, then {submit}")
