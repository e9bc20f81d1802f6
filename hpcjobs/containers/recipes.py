"""Recipes: the ``.def`` files that images are built from, with the arguments each one has."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import NamedTuple

from hpcjobs.containers.images import sha256
from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of
from hpcjobs.site.trust import is_project_folder, is_trusted, refusal_of_file

SUFFIX = ".def"
_SECTION = re.compile(r"%(\w+)(?:\s+(from)\b)?")
_HEADER = re.compile(r"(?i)\s*(bootstrap|from)\s*:\s*(\S+)")
_VARIABLE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_REMOTE = frozenset(("docker", "library", "shub", "oras", "docker-daemon"))
"""Kinds of ``Bootstrap:`` that do not read ``From:`` as a local file."""


class Recipe(NamedTuple):
    """The content of a recipe file."""

    name: str
    path: Path
    text: str
    arguments: dict[str, str]
    """Name -> default, of its ``%arguments``."""
    files: tuple[Path, ...]
    """Absolute paths of the local files that ``From:`` and ``%files`` take in, with the arguments' defaults."""
    about: str
    """The comment at its head."""


def recipe_folders() -> tuple[Path, ...]:
    """Folders searched for ``NAME.def``, first match wins: here, and shipped."""
    return (Path.cwd() / "containers", data_folder("containers"))


def recipes() -> dict[str, Path]:
    """Every recipe by its name."""
    by_name: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            by_name.setdefault(path.stem, path)
    return by_name


def project_recipes() -> tuple[Path, ...]:
    """The recipes of the current folder, which a command that names them builds only where they are trusted."""
    folder, *others = recipe_folders()
    return tuple(sorted(folder.glob(f"*{SUFFIX}"))) if is_project_folder(folder, *others) else ()


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or in the file ``name``, to be built.

    A file that is named by its path need not be trusted.

    Raises:
        RequestError: no such recipe. ConfigError: it cannot be read, or belongs to a project and is not trusted.
    """
    recipe = read_recipe(name)
    if not _is_path(name) and recipe.path in project_recipes() and not is_trusted(recipe.path, recipe_content(recipe)):
        raise refusal_of_file("recipe", recipe.path)
    return recipe


def recipe_content(recipe: Recipe) -> str:
    """The content of a recipe that is trusted: its text, and the images and files that it takes in."""
    files = (f"\0{path}\0{sha256(path) if path.is_file() else ''}" for path in recipe.files)
    return recipe.text + "".join(files)


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(SUFFIX)


def read_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or in the file ``name`` (anything with a ``/`` or ``.def``).

    Raises:
        RequestError: no recipe of this name. ConfigError: it cannot be read.
    """
    path = Path(name).expanduser().absolute() if _is_path(name) else recipes().get(name)
    if path is None:
        looked = "".join(f"\n  {folder}" for folder in dict.fromkeys(recipe_folders()))
        raise RequestError(f"no recipe {name!r}; looked in{looked}", hint=nearest(name, recipes()))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read: {reason_of(error)}") from error
    sections = _sections(text)
    arguments = _arguments(path, sections)
    about = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    return Recipe(path.stem, path, text, arguments, tuple(_list_files(path.parent, text, arguments)), about)


def resolve_arguments(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """The recipe's arguments with the given ones in place of its defaults.

    Raises:
        RequestError: the recipe has no such argument, or Apptainer's templates cannot hold a value.
    """
    for name, value in given.items():
        if name not in recipe.arguments:
            raise RequestError(f"recipe {recipe.path} has no argument {name!r}", hint=nearest(name, recipe.arguments))
        if any(ord(char) < 32 for char in value) or "{{" in value or "}}" in value:
            raise RequestError(
                f"argument {name}={value!r}: neither control characters nor braces can stand in a recipe"
            )
    return {**recipe.arguments, **given}


def recipe_hash(recipe: Recipe, arguments: Mapping[str, str], base_digest: str | None) -> str:
    """The hash of an image's known inputs: recipe, arguments, files taken in, base.

    Raises:
        ConfigError: a file that the recipe takes in is not there.
    """
    digest = hashlib.sha256(recipe.text.encode())
    for name in sorted(arguments):
        digest.update(f"\0{name}={arguments[name]}".encode())
    base = recipe.path.parent / arguments.get("base", "")  # base_digest covers it
    for path in _list_files(recipe.path.parent, recipe.text, arguments):
        if "base" in arguments and path.is_relative_to(base):
            continue
        if not path.is_file():
            raise ConfigError(f"recipe {recipe.path}: there is no file {path}")
        digest.update(f"\0{path.name}\0{sha256(path)}".encode())
    digest.update(f"\0{base_digest}".encode())
    return digest.hexdigest()[:16]


def _list_files(folder: Path, text: str, arguments: Mapping[str, str]) -> Iterator[Path]:
    """The local files that a build in ``folder`` takes in; missing files too."""
    filled = _VARIABLE.sub(lambda match: arguments.get(match[1], match[0]), text)
    bootstrap = ""
    for line in filled.splitlines():
        if (header := _HEADER.match(line)) is None:
            continue
        if header[1].lower() == "bootstrap":
            bootstrap = header[2].lower()
        elif bootstrap not in _REMOTE:
            image = folder / Path(header[2]).expanduser()
            yield from _files_below(image if image.exists() else folder / header[2].partition(":")[0])  # FILE:TAG
    for line in _sections(filled).get("files", ()):
        try:
            source = shlex.split(line)[0]
        except ValueError:  # a quotation that is not closed
            source = line.split()[0]
        for name in sorted(glob(source, root_dir=folder)) or [source]:
            yield from _files_below(folder / name)


def _files_below(path: Path) -> Iterator[Path]:
    """``path``, or all files in it: links are followed, each folder is visited once."""
    if not path.is_dir():
        yield path
        return
    visited = set()
    for parent, folders, names in os.walk(path, followlinks=True):
        visited.add(os.path.realpath(parent))
        folders[:] = sorted(name for name in folders if os.path.realpath(Path(parent, name)) not in visited)
        yield from (Path(parent, name) for name in sorted(names))


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section that hold something."""
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            lines = sections.setdefault(match[1], []) if match[2] is None else None  # of another stage
        elif lines is not None and line.strip() and not line.lstrip().startswith("#"):
            lines.append(line.strip())
    return sections


def _arguments(path: Path, sections: Mapping[str, list[str]]) -> dict[str, str]:
    arguments = {}
    for line in sections.get("arguments", ()):
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"recipe {path}: %arguments: {line!r} is not NAME=VALUE")
        arguments[name] = value.strip('"')
    return arguments
