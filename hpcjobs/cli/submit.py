"""``hpcjobs submit``.

Annotations are values here and not text, which Typer would have to compile, thirty times, at each start.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.options import EPILOG, with_sbatch_options
from hpcjobs.cli.output import Json, SiteName, note, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcjobs.job.models import Plan
    from hpcjobs.run.handle import JobHandle

app = typer.Typer(rich_markup_mode=None)


def _opt(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@app.command(context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_sbatch_options()
def submit(
    *,
    program: Annotated[list[str] | None, typer.Argument(help="Trainer, module, .py file or executable.")] = None,
    site: SiteName = None,
    resources: dict[str, object],
    option: Annotated[
        list[str] | None, _opt("-o", help="An option of sbatch by its name: -o exclusive=user; -o qos= clears.")
    ] = None,
    after: Annotated[list[str] | None, _opt("--after", help="Start after this job has succeeded.")] = None,
    launcher: Annotated[str | None, _opt("--launcher", help="srun, torchrun, mpirun, spawn …")] = None,
    env: Annotated[list[str] | None, _opt("--env", help="NAME=VALUE, or NAME to pass on.")] = None,
    name: Annotated[str | None, _opt("--name", "-J", help="Job name.")] = None,
    spec: Annotated[Path | None, _opt("--spec", help="YAML file with any of this; flags win.")] = None,
    template: Annotated[str | None, _opt("--template", help="Template of the job script, by name.")] = None,
    chdir: Annotated[str | None, _opt("--chdir", "-D", help="Folder the tasks start in.")] = None,
    retries: Annotated[
        str | None, _opt("--retries", help="Start again after: timeout=∞,preempt=∞,node=3,error=0; on; off.")
    ] = None,
    signal_before: Annotated[
        str | None, _opt("--signal-before", help="Signal the program this long before its time limit.")
    ] = None,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check the nodes first; end the job and name the node if one is bad.")
    ] = False,
    spare: Annotated[
        int | None, typer.Option(min=1, help="Extra nodes to request; the best ones are used.", show_default=False)
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Continue with at least this many nodes when others fail (torchrun, --retries).",
            show_default=False,
        ),
    ] = None,
    container: Annotated[
        str | None, _opt("--container", help="Run it in this image: a name of the site's, or a file; none.")
    ] = None,
    stage_image: Annotated[bool, typer.Option("--stage-image", help="Copy the image to each node first.")] = False,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Copy the code and run the copy.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print each value and where it was read.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit code of the job.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the log while the job runs, then end as --wait does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit PROGRAM. Options stand before it; everything after it belongs to it."""
    import hpcjobs

    plan = hpcjobs.plan(
        program or [],
        site=site,
        spec=spec,
        name=name,
        launcher=launcher,
        env=environment(env or []),
        template=template,
        chdir=chdir,
        snapshot=snapshot or None,
        retries=retries,
        signal_before=signal_before,
        preflight=preflight or None,
        spare=spare,
        min_nodes=min_nodes,
        container=container,
        stage_image=stage_image or None,
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
        **sbatch_options(option or [], resources, dependency=_after(after or [], site)),
    )
    print_notes(plan)
    if explain and not (dry_run and as_json):  # the plan's own JSON tells the sources too
        _print_sources(plan, as_json=as_json)
    if dry_run or explain:
        if dry_run:
            _print_plan(plan, as_json=as_json)
        return
    handle = hpcjobs.submit(plan)
    if plan.job.rehearsal:
        note(f"rehearsal: the sandbox on this machine plays site {plan.job.site}")
    _report(handle, plan, as_json=as_json)
    if wait or follow:
        from hpcjobs.cli.wait import follow_to_end, wait_for

        raise typer.Exit(follow_to_end(handle) if follow else wait_for([handle.entry]))


def print_notes(plan: "Plan") -> None:
    """Print what the user should know of the plan."""
    from hpcjobs.job.notes import notes

    for line in notes(plan.job):
        note(line)


# sbatch's own names of what has a flag, or is not to be changed.
_NOT_BY_O = {
    "job_name": "say --name",
    "name": "say --name",
    "chdir": "say --chdir",
    "output": "hpcjobs logs shows the output, which lies in the run folder",
    "error": "hpcjobs logs shows the output, which lies in the run folder",
    "export": "say --env",
    "wait": "say --wait",
}


def sbatch_options(
    words: list[str], flags: "Mapping[str, object]", *, dependency: str | None = None
) -> dict[str, object]:
    """``-o key=value``, ``-o key`` (a flag), ``-o key=`` (clears), keys with dashes or underscores.

    ``flags`` are options that were given by flags of their own (None: not given), and are part of the answer;
    ``dependency`` comes on top of theirs.

    Raises:
        RequestError: no such option, or it was given by its own flag too.
    """
    from hpcjobs.errors import RequestError, nearest
    from hpcjobs.site.models import Resources

    options = {name: value for name, value in flags.items() if value is not None}
    if dependency is not None:
        options["dependency"] = ",".join(filter(None, (str(options.get("dependency") or ""), dependency)))
    by_o: dict[str, object] = {}
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        name = key.replace("-", "_")
        if name not in Resources.__struct_fields__:
            hint = _NOT_BY_O.get(name) or nearest(name, Resources.__struct_fields__)
            raise RequestError(f"-o {word}: no sbatch option that -o can set", hint=hint)
        if name in options:
            raise RequestError(f"-o {word}: {name} has been given by its own flag too", hint="leave one of them out")
        by_o[name] = (value or None) if equals else True
    return options | by_o


def _after(words: list[str], site: str | None) -> str | None:
    """The dependency on the jobs that ``words`` name, which must be jobs of the same site."""
    if not words:
        return None
    from hpcjobs.run.select import select
    from hpcjobs.run.state_file import own_ids
    from hpcjobs.site.library import default_site, load_site

    entries = select(words, site=load_site(site or default_site()).name)
    ids = [entry.job_id if entry.task is None else own_ids(entry)[0] for entry in entries]
    return ":".join(["afterok", *ids])


def environment(words: list[str]) -> dict[str, str]:
    """``--env NAME=VALUE``, or ``--env NAME`` to pass a variable on."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and key not in os.environ:
            raise typer.BadParameter(f"--env {key}: not set here; say {key}=VALUE")
        found[key] = value if equals else os.environ[key]
    return found


def _print_sources(plan: "Plan", *, as_json: bool) -> None:
    from hpcjobs.cli.output import print_table

    job = plan.job
    values = {field: getattr(job.resources, field) for field in job.resources.__struct_fields__}
    values |= {field: getattr(job, field) for field in ("name", "launcher", "template", "chdir")}
    values["container"] = job.container.image if job.container else None
    values |= {f"env.{key}": value for key, value in job.env.items()}
    site = f"site {job.site} ({job.site_file})"
    rows = [
        (key, str(value), job.sources.get(key, site if key.startswith("env.") else "default"))
        for key, value in values.items()
        if value is not None
    ]
    if as_json:
        print_json([{"name": name, "value": value, "source": source} for name, value, source in rows])
        return
    print_table(["value", "", "from"], rows)


def _print_plan(plan: "Plan", *, as_json: bool) -> None:
    from hpcjobs.job.plan import script_by_hand

    script = script_by_hand(plan)
    if as_json:
        print_json(plan._asdict() | {"run_dir": str(plan.run_dir), "script": script})
        return
    note(f"dry run, nothing written; would make {plan.run_dir} and run: {shlex.join(plan.command)}")
    sys.stdout.write(script)


def _report(handle: "JobHandle", plan: "Plan", *, as_json: bool) -> None:
    if as_json:
        print_json({"job_id": handle.id, "cluster": handle.entry.cluster, "site": plan.job.site,
                    "run_dir": str(plan.run_dir), "name": plan.job.name})  # fmt: skip
        return
    print(f"job {handle.id}  {plan.job.name} on site {plan.job.site}")
    print(f"run folder {plan.run_dir}")
    print(f"next: hpcjobs logs -f {handle.id}", flush=True)  # before what waiting says, also on a pipe
