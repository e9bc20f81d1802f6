"""``hpcjobs sites trust``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from hpcjobs.cli.completion import complete_sites


class _File(NamedTuple):
    """A file that needs trust and has not got it."""

    path: Path
    content: str
    """What its trust depends on."""
    acting: str
    """What of it acts, to be read."""


def trust(
    file: Annotated[
        str | None,
        typer.Argument(
            help="Site file or name, template or recipe [those of ./site_configs, ./templates, ./containers].",
            show_default=False,
            autocompletion=complete_sites,
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Trust it no longer.")] = False,
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
    from hpcjobs.containers.recipes import project_recipes
    from hpcjobs.job.script import project_templates
    from hpcjobs.site.search import FOLDER

    return [*sorted((Path.cwd() / FOLDER).glob("*.yaml")), *project_templates(), *project_recipes()]


def _find(file: str) -> Path:
    from hpcjobs.site.search import find_file

    path = Path(file).expanduser().absolute()
    return path if _is_whole(path) else find_file(file)


def _is_whole(path: Path) -> bool:
    """Whether all of the file acts: a template or a recipe, and no site file."""
    from hpcjobs.containers import recipes
    from hpcjobs.job.script import is_template

    return path.suffix == recipes.SUFFIX or (path.suffix not in (".yaml", ".yml", "") and is_template(path))


def _list_untrusted(path: Path) -> Iterator[_File]:
    """``path``, or the site files that it leads to, as far as they need trust and have not got it."""
    import yaml

    from hpcjobs.site.inheritance import read_chain
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
    """What acts of a template or recipe, and what its trust depends on."""
    from hpcjobs.containers import recipes
    from hpcjobs.job.script import read_template

    if path.suffix != recipes.SUFFIX:
        text = read_template(path)
        return text, text
    recipe = recipes.read_recipe(str(path))
    taken_in = "".join(f"# takes in {file}\n" for file in recipe.files)
    return f"{recipe.text.rstrip()}\n{taken_in}", recipes.recipe_content(recipe)
