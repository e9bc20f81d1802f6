"""Recipes: the ``.def`` files that images are built from, with the arguments each one has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of
from hpcjobs.site.trust import is_project_folder, is_trusted, refusal_of_file

SUFFIX = ".def"
_SECTION = re.compile(r"%(\w+)")


class Recipe(NamedTuple):
    """One file, read."""

    name: str
    path: Path
    text: str
    arguments: dict[str, str]
    """Name -> default, of its ``%arguments``."""
    files: tuple[Path, ...]
    """Absolute, of its ``%files``: what it takes in from this machine."""
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

    A file that is named by its path is taken as it is.

    Raises:
        RequestError: there is none. ConfigError: it cannot be read, or is a project's and not trusted.
    """
    recipe = read_recipe(name)
    if not _is_path(name) and recipe.path in project_recipes() and not is_trusted(recipe.path, recipe_content(recipe)):
        raise refusal_of_file("recipe", recipe.path)
    return recipe


def recipe_content(recipe: Recipe) -> str:
    """What is trusted of a recipe: its text, and that of the files that it takes in."""
    files = (f"\0{path}\0{_hash(path) if path.is_file() else ''}" for path in recipe.files)
    return recipe.text + "".join(files)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(SUFFIX)


def read_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or in the file ``name`` (anything with a ``/`` or ``.def``).

    Raises:
        RequestError: there is none of this name. ConfigError: it cannot be read.
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
    files = (path.parent / line.split()[0] for line in sections.get("files", ()) if "{{" not in line.split()[0])
    about = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    return Recipe(path.stem, path, text, _arguments(path, sections), tuple(files), about)


def resolve_arguments(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """The recipe's arguments with the given ones in place of its defaults.

    Raises:
        RequestError: it has no such argument, or a value holds what Apptainer's templates cannot.
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
    """Of everything an image depends on that is known here: recipe, arguments, files taken in, base.

    Raises:
        ConfigError: a file that the recipe takes in is not there.
    """
    digest = hashlib.sha256(recipe.text.encode())
    for name in sorted(arguments):
        digest.update(f"\0{name}={arguments[name]}".encode())
    for path in recipe.files:
        if not path.is_file():
            raise ConfigError(f"recipe {recipe.path}: %files: there is no file {path}")
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    digest.update(f"\0{base_digest}".encode())
    return digest.hexdigest()[:16]


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section that hold something."""
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            lines = sections.setdefault(match[1], [])
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
