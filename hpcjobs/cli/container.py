"""``hpcjobs container``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hpcjobs
from hpcjobs.cli.arguments import CommandLineError, verb_group
from hpcjobs.cli.completion import complete_images, complete_recipes
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output, print_table
from hpcjobs.cli.terminal import write_document
from hpcjobs.units import clock

if TYPE_CHECKING:
    from hpcjobs.containers.images import ImageFacts, ImageManifest

app = verb_group("Images: build them from recipes, list them, check one against a site.")
_NOT_FIT = 5


@app.command()
def build(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Recipe: a name (container list shows them) or a .def file.", autocompletion=complete_recipes
        ),
    ],
    site: SiteName = None,
    base: Annotated[
        str | None,
        opt("--base", help="Base image: debian:12 (of Docker), SCHEME://NAME, or a local file [the recipe's]."),
    ] = None,
    arg: Annotated[
        list[str] | None, opt("--arg", help="Value for one of the recipe's %arguments: NAME=VALUE; may be repeated.")
    ] = None,
    wheels: Annotated[
        Path | None, opt("--wheels", help="Folder of wheels compiled earlier on this distribution.")
    ] = None,
    fakeroot: Annotated[bool, opt("--fakeroot", help="Build by --fakeroot, without being root.")] = False,
    force: Annotated[bool, opt("--force", help="Build even if nothing has changed.")] = False,
    submit: Annotated[bool, opt("--submit", help="Build in a job on a node.")] = False,
    option: Annotated[list[str] | None, opt("-o", help="With --submit, any sbatch option: -o time=2h.")] = None,
    dry_run: Annotated[bool, opt("--dry-run", help="With --submit, print what would be sent.")] = False,
    as_json: Json = False,
) -> None:
    """Build an image into the site's folder, unless the image there is up to date."""
    from hpcjobs.containers.build import build as build_image
    from hpcjobs.containers.build import last_build
    from hpcjobs.containers.images import find_recipe
    from hpcjobs.site.library import default_site, load_site

    if submit or dry_run:
        raise typer.Exit(_in_a_job(site, recipe, option or [], dry_run=dry_run))
    arguments = dict(_pair(pair) for pair in arg or [])
    image_site, image_recipe = load_site(site or default_site()), find_recipe(recipe)
    with _build_bar(image_recipe.name, last_build(image_recipe, image_site)) as say:
        built = build_image(
            image_recipe,
            image_site,
            base=base,
            arguments=arguments,
            wheels=wheels.expanduser().absolute() if wheels else None,
            fakeroot=fakeroot,
            force=force,
            say=say,
        )
    if as_json:
        print_output("container build", {"path": str(built.path), "new": built.new, "manifest": built.manifest})
        return
    size = built.manifest.size / 2**20
    print(f"{'built' if built.new else 'unchanged'}  {built.path}  {size:,.0f} MiB  {_in_words(built.manifest.facts)}")


@app.command("list")
def list_(site: SiteName = None, as_json: Json = False) -> None:
    """List the images of a site and the available recipes."""
    from hpcjobs.containers.images import known, read_manifest, read_recipe, recipes
    from hpcjobs.site.library import default_site, load_site

    where = load_site(site or default_site())
    images = {name: (path, read_manifest(Path(path))) for name, path in known(where).items()}
    about = {name: read_recipe(str(path)).about for name, path in recipes().items()}
    if as_json:
        rows_json = [{"name": name, "path": path, "manifest": manifest} for name, (path, manifest) in images.items()]
        print_output("container list", {"images": rows_json, "recipes": about})
        return
    rows = [
        (name, clock(manifest.built) if manifest else "-", _in_words(manifest.facts) if manifest else "-", path)
        for name, (path, manifest) in images.items()
    ]
    if rows:
        print_table(["IMAGE", "BUILT", "WITH", "FILE"], rows)
    else:
        print(f"no images of site {where.name} (hpcjobs container build RECIPE makes one)")
    print()
    print_table(["RECIPE", "FOR"], about.items())


@app.command()
def check(
    image: Annotated[
        str, typer.Argument(help="Name of an image of the site, or a file.", autocompletion=complete_images)
    ],
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """Show what an image contains and whether it fits the site. Exit code 5 if a job would fail."""
    from hpcjobs.containers.images import find
    from hpcjobs.containers.look import check as check_image
    from hpcjobs.site.library import default_site, load_site

    where = load_site(site or default_site())
    verdict = check_image(find(image, where, source="check"), where)
    if as_json:
        print_output("container check", {"verdict": verdict, "fits": not verdict.failed})
    else:
        for finding in verdict.findings:
            print(f"{finding.level:<8} {finding.about:<8} {finding.text}")
            if finding.fix:
                print(f"{'':<17} fix: {finding.fix}")
        print(f"{verdict.image} {'does not fit' if verdict.failed else 'fits'} site {where.name}")
    if verdict.failed:
        raise typer.Exit(_NOT_FIT)


@contextmanager
def _build_bar(name: str, before: ImageManifest | None) -> Iterator[Callable[[str], None]]:
    """Return a function that prints a step of the build above a bar, scaled by the time of the previous build."""
    from hpcjobs.cli.progress import ProgressBars

    began = time.monotonic()
    with ProgressBars() as bars:

        def say(line: str) -> None:
            note(line)
            if bars.are_drawn:
                elapsed_s, total_s = time.monotonic() - began, before.took_s if before is not None else None
                left_s = None if total_s is None else max(0.0, total_s - elapsed_s)
                text = "the time the last build took" if total_s is not None else ""
                bars.show(f"building {name}", elapsed_s, total_s, text=text, remaining_s=left_s)

        yield say


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandLineError(f"--arg {text}: write NAME=VALUE")
    return name, value


def _in_words(facts: ImageFacts) -> str:
    versions = {
        "python": facts.python,
        "torch": facts.torch,
        "CUDA": facts.cuda,
        "horovod": facts.horovod,
        "": facts.mpi,
    }
    return ", ".join(f"{name} {version}".strip() for name, version in versions.items() if version)


def _in_a_job(site: str | None, recipe: str, option: list[str], *, dry_run: bool) -> int:
    """The same command, without --submit and its options, on one node; its log as it comes."""
    from hpcjobs.cli.follow import follow_to_end
    from hpcjobs.cli.options import sbatch_options
    from hpcjobs.containers.images import find_recipe, read_recipe
    from hpcjobs.processes.programs import own_command

    recipe_name = (read_recipe if dry_run else find_recipe)(recipe).name
    args = [arg for arg in _own_arguments(sys.argv[1:]) if arg not in ("--submit", "--dry-run")]
    options: dict[str, Any] = {"nodes": 1, "ntasks_per_node": 1, **sbatch_options(option, {})}
    plan = hpcjobs.plan(
        own_command(*args),
        site=site,
        name=f"build-{recipe_name}",
        container="none",
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
        **options,
    )
    if dry_run:
        write_document(plan.script)
        return 0
    handle = hpcjobs.submit(plan)
    note(f"job {handle.id} on site {plan.job.site}; run folder {plan.run_dir}")
    return follow_to_end(handle)


def _own_arguments(argv: list[str]) -> list[str]:
    """``argv`` without ``-o`` and its value, which are the job's."""
    remaining, skip = [], False
    for arg in argv:
        if skip or arg == "-o":
            skip = not skip
        elif not arg.startswith("-o"):
            remaining.append(arg)
    return remaining
