"""``hpcjobs sites``: list, show, init, check, trust."""

from __future__ import annotations

import os
import shlex
import sys
import time as clock
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
import yaml

from hpcjobs.cli.arguments import VerbGroup
from hpcjobs.cli.completion import complete_sites
from hpcjobs.cli.output import Json, note, opt, print_output, print_table
from hpcjobs.cli.terminal import exit_on_signals, write_document
from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.scheduler_kind import CLUSTER
from hpcjobs.site.machine import current_sandbox
from hpcjobs.site.models import OF_THE_LOADER, Site
from hpcjobs.site.schema import schema_text
from hpcjobs.site.search import FOLDER, SHIPPED, find_file, list_sites
from hpcjobs.site.yaml_file import Steps, list_origins, read_chain, write_flow
from hpcjobs.slurm_commands import cluster_env
from hpcjobs.units import format_count, walltime_s

if TYPE_CHECKING:
    from hpcjobs.discovery.partitions import ProposedSite
    from hpcjobs.site.search import SiteEntry


def write_site(site: Site) -> Iterator[str]:
    """Return ``site`` as the lines of a site file; a value without a comment is the default."""
    yield f"# {site.path}" + (" (rehearsal on the sandbox)" if site.rehearsal else "")
    yield from (f"# extends {path}" for path in site.extended)
    overlay = current_sandbox() if site.rehearsal else None
    replaced = {*overlay.overlay, "slurm_conf"} if overlay is not None else set[str]()
    read = list_origins(read_chain(Path(site.path)))
    origins = {steps: where for steps, where in read.items() if steps and steps[0] not in replaced}
    origins |= {(key,): "the sandbox" for key in replaced}
    left_out = (
        *OF_THE_LOADER,
        "extends",
        *(("policy",) if site.policy is None else ()),
    )  # a key policy is the centre's
    fields = {key: value for key, value in msgspec.to_builtins(site).items() if key not in left_out}
    yield from _lines(fields, origins, ())


def _lines(tree: Mapping[str, Any], origins: Mapping[Steps, str], steps: Steps) -> Iterator[str]:
    for key, value in tree.items():
        path = (*steps, key)
        start = "  " * len(steps) + f"{write_flow(key)}:"
        origin = f"  # {origins[path]}" if path in origins else ""
        if isinstance(value, dict) and value:
            yield start + origin
            yield from _lines(value, origins, path)
        else:
            yield f"{start} {write_flow(value)}{origin}"


def check(
    name: Annotated[
        str | None,
        typer.Argument(help="Site name or file [the default site].", show_default=False, autocompletion=complete_sites),
    ] = None,
    run: Annotated[bool, opt("--run", help="Run a small job per partition and launcher too.")] = False,
    time: Annotated[str, typer.Option("-t", "--time", help="Time limit of these jobs.")] = "5m",
    timeout: Annotated[str, typer.Option(help="How long to wait for these jobs; then they are cancelled.")] = "30m",
    as_json: Json = False,
) -> None:
    """Compare a site file with the live cluster: what works, what does not, why, what to change; exit code 0 or 1."""
    from hpcjobs.discovery.compare import compare, list_untried, run_trials, unusable_partitions
    from hpcjobs.discovery.slurm_config import read_cluster
    from hpcjobs.processes.programs import run as run_program
    from hpcjobs.scheduler.base import connect
    from hpcjobs.site.library import default_site, load_site

    site = load_site(name or default_site())
    try:
        timeout_s = walltime_s(timeout)
    except ValueError as error:
        raise RequestError(f"--timeout {timeout}: not a time", hint="write 30m or 2h") from error
    if not site.kind.has_partitions:
        raise RequestError(f"site {site.name} ({site.path}) has no Slurm to compare it with")
    runner = partial(run_program, env=cluster_env(site.slurm_conf))
    findings = compare(site, read_cluster(connect(CLUSTER, site.slurm_conf), runner))
    if not run:
        findings += list_untried(site)
    else:
        exit_on_signals()
        unusable = unusable_partitions(findings)
        findings += run_trials(site, site.name, time=time, timeout_s=timeout_s, without=unusable, report=note)
    is_wrong = any(finding.verdict == "wrong" for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        print_output("sites check", {"site": site.name, "path": site.path, "ok": not is_wrong, "findings": rows})
    else:
        print_table(["CHECK", "", "WHAT", "CHANGE"], [(f.subject, f.verdict, f.text, f.change) for f in findings])
    raise typer.Exit(int(is_wrong))


def init(
    name: Annotated[
        str | None, typer.Argument(help="Name of the site [Slurm's ClusterName].", show_default=False)
    ] = None,
    file: Annotated[Path | None, opt("--file", help="Write this file [NAME.yaml among your site files].")] = None,
    force: Annotated[bool, opt("--force", help="Replace a file that exists.")] = False,
    dry_run: Annotated[bool, opt("--dry-run", help="Print the file and write nothing.")] = False,
    as_json: Json = False,
    partition: Annotated[str | None, typer.Option("-p", "--partition", help="Default partition.")] = None,
    account: Annotated[str | None, typer.Option("-A", "--account", help="Account of jobs that name none.")] = None,
    qos: Annotated[str | None, typer.Option("-q", "--qos", help="QOS of jobs that name none.")] = None,
    time: Annotated[str | None, typer.Option("-t", "--time", help="Time limit of jobs that name none [1h].")] = None,
    mpi: Annotated[str | None, typer.Option(help="MPI type for srun --mpi.")] = None,
    interface: Annotated[str | None, typer.Option(help="Fast network interface of the nodes.")] = None,
    module: Annotated[list[str] | None, typer.Option(help="Module that jobs load; repeatable.")] = None,
    module_init: Annotated[str | None, typer.Option(help="Script that defines module on the nodes.")] = None,
    conda: Annotated[str | None, typer.Option(help="Conda environment of jobs: name or path.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment of jobs.")] = None,
    container_runtime: Annotated[
        str | None, typer.Option(help="Container runtime of the nodes: apptainer, singularity, pyxis or none.")
    ] = None,
    scratch: Annotated[str | None, typer.Option(help="Scratch folder of a node, expanded there.")] = None,
    run_root: Annotated[str | None, typer.Option(help="Folder of run folders; all nodes see it.")] = None,
    login: Annotated[str | None, typer.Option(help="Name of the login node from outside.")] = None,
) -> None:
    """Write a site file from the cluster of this login node, with the origin of each value and the open questions."""
    from hpcjobs.discovery.draft import choose_path, default_name, draft_site, save_text, write_text
    from hpcjobs.discovery.partitions import Answers
    from hpcjobs.discovery.slurm_config import read_cluster
    from hpcjobs.scheduler.base import connect

    answers = Answers(
        partition=partition, account=account, qos=qos, time=time, mpi=mpi, interface=interface,
        modules=tuple(module or ()), module_init=module_init, conda=conda, venv=venv,
        container_runtime=container_runtime, scratch=scratch, run_root=run_root, login=login,
    )  # fmt: skip
    path = choose_path(name, file, force=force or dry_run) if name is not None or file is not None else None
    cluster = read_cluster(connect(CLUSTER))
    if path is None:
        path = choose_path(default_name(cluster), None, force=force or dry_run)
    draft = draft_site(path.stem, cluster, answers)
    text = write_text(draft, made=f"hpcjobs sites init on {os.uname().nodename}, {clock.strftime('%F')}")
    if not dry_run:
        save_text(path, text, force=force)
    if as_json:
        _print_draft(draft, path, text, written=not dry_run)
        return
    if dry_run:
        write_document(text)
        return
    partitions = format_count(len(draft.partitions), "partition")
    questions = format_count(len(draft.questions), "open question")
    print(f"wrote {path}: {partitions}, {questions} at its end")
    named = shlex.quote(str(path)) if file is not None else draft.name
    print(f"next: hpcjobs submit --site {named} --dry-run hostname")
    if draft.omissions:
        note("left out: " + "; ".join(f"{o.partition} ({o.reason})" for o in draft.omissions))


def _print_draft(draft: ProposedSite, path: Path, text: str, *, written: bool) -> None:
    print_output(
        "sites init",
        {
            "name": draft.name,
            "path": str(path),
            "written": written,
            "site": yaml.safe_load(text),
            "origins": {entry.key: entry.origin for entry in draft.entries},
            "left_out": {omission.partition: omission.reason for omission in draft.omissions},
            "facts": draft.notes,
            "questions": [question._asdict() for question in draft.questions],
        },
    )


class _File(NamedTuple):
    """A file that needs trust and has not got it."""

    path: Path
    content: str
    """Content that trust depends on."""
    acting: str
    """Content that acts, for the user to read."""


def trust(
    file: Annotated[
        str | None,
        typer.Argument(
            help="Site file or name, template, recipe, project file [those of site_configs, templates, containers].",
            show_default=False,
            autocompletion=complete_sites,
        ),
    ] = None,
    undo: Annotated[bool, opt("--undo", help="Trust it no longer.")] = False,
) -> None:
    """Trust files of the current folder as they are now: site files that run `setup`, templates, recipes."""
    from hpcjobs.site.trust import forget_file, trust_file

    paths = _all_paths() if file is None else [_find(file)]
    if undo:
        for path in paths:
            print(f"{path}: " + ("no longer trusted" if forget_file(path) else "was not trusted"))
        return
    files = {untrusted.path: untrusted for path in paths for untrusted in _list_untrusted(path)}
    for untrusted in files.values():
        trust_file(untrusted.path, untrusted.content)
        print(f"trusted as it is now: {untrusted.path}; it sets")
        print("".join(f"  {line}\n" for line in untrusted.acting.splitlines()), end="")
    if not files:
        print(f"nothing to trust in {', '.join(map(str, paths)) or Path.cwd()}")


def _all_paths() -> Sequence[Path]:
    from hpcjobs.containers.images import project_recipes
    from hpcjobs.job.script import project_templates

    return [*sorted((Path.cwd() / FOLDER).glob("*.yaml")), *project_templates(), *project_recipes()]


def _find(file: str) -> Path:
    path = Path(file).expanduser().absolute()
    return path if _is_whole(path) else find_file(file)


def _is_whole(path: Path) -> bool:
    """Whether all of the file acts: a template, a recipe or a project file, and no site file."""
    from hpcjobs.containers import images
    from hpcjobs.job.script import is_template
    from hpcjobs.site.library import PROJECT_FILE

    return (
        path.name == PROJECT_FILE
        or path.suffix == images.RECIPE_SUFFIX
        or (path.suffix not in (".yaml", ".yml", "") and is_template(path))
    )


def _list_untrusted(path: Path) -> Iterator[_File]:
    """``path``, or the site files that it leads to, as far as they need trust and have not got it."""
    from hpcjobs.site.trust import acting_keys, is_trusted, untrusted_files

    if _is_whole(path):
        text, content = _read(path)
        if not is_trusted(path, content):
            yield _File(path, content, text)
        return
    for site_file in untrusted_files(read_chain(path)):
        values = {key: site_file.tree[key] for key in dict.fromkeys(steps[0] for steps in acting_keys(site_file))}
        yield _File(site_file.path, site_file.text, yaml.safe_dump(values, sort_keys=False, allow_unicode=False))


def _read(path: Path) -> tuple[str, str]:
    """Return the acting content of a template or recipe, and the content that its trust depends on."""
    from hpcjobs.containers import images
    from hpcjobs.job.script import read_template

    if path.suffix != images.RECIPE_SUFFIX:
        text = read_template(path)
        return text, text
    recipe = images.read_recipe(str(path))
    taken_in = "".join(f"# takes in {file}\n" for file in recipe.files)
    return f"{recipe.text.rstrip()}\n{taken_in}", images.recipe_content(recipe)


app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False, invoke_without_command=True)
app.command("init")(init)
app.command("check")(check)
app.command("trust")(trust)


@app.callback()
def sites(context: typer.Context, as_json: Json = False) -> None:
    """List the site files of every layer; `sites show NAME` prints one, `sites init` writes one."""
    if context.invoked_subcommand is not None:
        return

    entries = list_sites()
    rows = [_row(entry, entries) for entry in entries]
    if as_json:
        print_output("sites", rows)
        return
    tables = {
        "SITE": [row for row in rows if row["layer"] not in SHIPPED],
        "EXAMPLE": [row for row in rows if row["layer"] == "example"],
        "GALLERY": [row for row in rows if row["layer"] == "gallery"],
    }
    for number, (title, rows_of_table) in enumerate((title, some) for title, some in tables.items() if some):
        print("\n" * bool(number), end="")
        _print_rows(rows_of_table, title)


def _row(entry: SiteEntry, entries: list[SiteEntry]) -> dict[str, object]:
    from hpcjobs.site.library import read_site

    extended: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    try:
        site = read_site(entry.path)
        description, extended, untrusted = site.description, site.extended, site.untrusted
    except ConfigError as error:
        description = f"broken: {error.message}"
    winner = next(other for other in entries if other.name == entry.name)
    return {
        "name": entry.name,
        "path": str(entry.path),
        "shadowed": entry.shadowed,
        "shadowed_by": str(winner.path) if entry.shadowed else None,
        "layer": entry.layer,
        "extends": extended,
        "untrusted": untrusted,
        "description": description,
    }


def _print_rows(rows: list[dict[str, object]], title: str) -> None:
    """A table of sites; sites of one folder, as the shipped ones, have its name once, below the table."""

    def file(row: dict[str, object]) -> str:
        shadow = f" (shadowed by {row['shadowed_by']})" if row["shadowed"] else ""
        return str(row["path"]) + (" (not trusted)" if row["untrusted"] else "") + shadow

    folders = {str(Path(str(row["path"])).parent) for row in rows}
    if title == "SITE" or len(folders) > 1 or any(row["shadowed"] for row in rows):
        print_table(
            [title, "DESCRIPTION", "LAYER", "FILE"],
            [(str(row["name"]), str(row["description"]).strip(), str(row["layer"]), file(row)) for row in rows],
        )
        return
    print_table([title, "DESCRIPTION"], [(str(row["name"]), str(row["description"]).strip()) for row in rows])
    print(f"files: {folders.pop()}/NAME.yaml")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Site name or file.", autocompletion=complete_sites)],
    as_json: Json = False,
) -> None:
    """Print a site as hpcjobs uses it: every key, defaults included, with the file and line of each key that is set."""
    from hpcjobs.site.library import load_site

    site = load_site(name, allow_untrusted=True)
    if as_json:
        print_output("sites show", site)
        return
    write_document("".join(f"{line}\n" for line in write_site(site)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a site file; editors use it to complete and check keys."""
    sys.stdout.write(schema_text())
