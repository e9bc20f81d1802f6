"""``hpcjobs container``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.output import Json, SiteName, clock, note, print_json, print_table

if TYPE_CHECKING:
    from hpcjobs.containers.images import Facts

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
_NOT_FIT = 5


def _opt(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@app.callback()
def container() -> None:
    """Images: build them from recipes, list them, check one against a site."""


@app.command()
def build(
    recipe: Annotated[str, typer.Argument(help="Recipe: a name (container list shows them) or a .def file.")],
    site: SiteName = None,
    base: Annotated[
        str | None, _opt("--base", help="Start from debian:12 (Docker's), SCHEME://NAME, or a local image.")
    ] = None,
    arg: Annotated[list[str] | None, _opt("--arg", help="NAME=VALUE of the recipe's %arguments.")] = None,
    wheels: Annotated[
        Path | None, _opt("--wheels", help="Folder of wheels compiled earlier on this distribution.")
    ] = None,
    fakeroot: Annotated[bool, typer.Option("--fakeroot", help="Build by --fakeroot, without being root.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build even if nothing has changed.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Build in a job on a node.")] = False,
    option: Annotated[list[str] | None, _opt("-o", help="With --submit, any sbatch option: -o time=2h.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --submit, print what would be sent.")] = False,
    as_json: Json = False,
) -> None:
    """Build an image into the site's folder; nothing is done when nothing has changed."""
    from hpcjobs.containers.build import build as build_image
    from hpcjobs.containers.recipes import read_recipe
    from hpcjobs.site.library import default_site, load_site

    if submit or dry_run:
        raise typer.Exit(_in_a_job(site, recipe, option or [], dry_run=dry_run))
    said = dict(_pair(word) for word in arg or [])
    built = build_image(
        read_recipe(recipe),
        load_site(site or default_site()),
        base=base,
        arguments=said,
        wheels=wheels.expanduser().absolute() if wheels else None,
        fakeroot=fakeroot,
        force=force,
        say=note,
    )
    if as_json:
        print_json({"path": str(built.path), "new": built.new, "manifest": built.manifest})
        return
    size = built.manifest.size / 2**20
    print(f"{'built' if built.new else 'unchanged'}  {built.path}  {size:,.0f} MiB  {_in_words(built.manifest.facts)}")


@app.command("list")
def list_(site: SiteName = None, as_json: Json = False) -> None:
    """The images of a site, and the recipes there are."""
    from hpcjobs.containers.images import known, read_manifest
    from hpcjobs.containers.recipes import read_recipe, recipes
    from hpcjobs.site.library import default_site, load_site

    where = load_site(site or default_site())
    images = {name: (path, read_manifest(Path(path))) for name, path in known(where).items()}
    about = {name: read_recipe(str(path)).about for name, path in recipes().items()}
    if as_json:
        told = [{"name": name, "path": path, "manifest": manifest} for name, (path, manifest) in images.items()]
        print_json({"images": told, "recipes": about})
        return
    rows = [
        (name, clock(found.built) if found else "-", _in_words(found.facts) if found else "-", path)
        for name, (path, found) in images.items()
    ]
    print_table(["image", "built", "with", "file"], rows)
    print()
    print_table(["recipe", "for"], about.items())


@app.command()
def check(
    image: Annotated[str, typer.Argument(help="Name of an image of the site, or a file.")],
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """What is inside an image, and whether it fits the site; exit code 5 if a job would fail."""
    from hpcjobs.containers.images import find
    from hpcjobs.containers.verdict import check as check_image
    from hpcjobs.site.library import default_site, load_site

    where = load_site(site or default_site())
    verdict = check_image(find(image, where, said="check"), where)
    if as_json:
        print_json({"verdict": verdict, "fits": not verdict.failed})
    else:
        for finding in verdict.findings:
            print(f"{finding.level:<8} {finding.about:<8} {finding.text}")
            if finding.fix:
                print(f"{'':<17} fix: {finding.fix}")
        print(f"{verdict.image} {'does not fit' if verdict.failed else 'fits'} site {where.name}")
    if verdict.failed:
        raise typer.Exit(_NOT_FIT)


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise typer.BadParameter(f"--arg {word}: say NAME=VALUE")
    return name, value


def _in_words(facts: Facts) -> str:
    told = {"python": facts.python, "torch": facts.torch, "CUDA": facts.cuda, "horovod": facts.horovod, "": facts.mpi}
    return ", ".join(f"{name} {version}".strip() for name, version in told.items() if version)


def _in_a_job(site: str | None, recipe: str, option: list[str], *, dry_run: bool) -> int:
    """The same command, without --submit and its options, on one node; its log as it comes."""
    import hpcjobs
    from hpcjobs.cli.job_options import sbatch_options
    from hpcjobs.cli.wait import follow_to_end
    from hpcjobs.containers.recipes import read_recipe

    words = [word for word in _own_words(sys.argv[1:]) if word not in ("--submit", "--dry-run")]
    asked: dict[str, Any] = {"nodes": 1, "ntasks_per_node": 1, **sbatch_options(option, {})}
    plan = hpcjobs.plan(
        [sys.executable, "-u", "-m", "hpcjobs", *words],
        site=site,
        name=f"build-{read_recipe(recipe).name}",
        container="none",
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
        **asked,
    )
    if dry_run:
        sys.stdout.write(plan.script)
        return 0
    handle = hpcjobs.submit(plan)
    note(f"job {handle.id} on site {plan.job.site}; run folder {plan.run_dir}")
    return follow_to_end(handle)


def _own_words(words: list[str]) -> list[str]:
    """``words`` without ``-o`` and its value, which are the job's."""
    kept, skip = [], False
    for word in words:
        if skip or word == "-o":
            skip = not skip
        elif not word.startswith("-o"):
            kept.append(word)
    return kept
