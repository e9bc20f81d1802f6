"""Recipes: the ``.def`` files that images are built from, with the arguments each one has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpcjobs.data import shipped
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of

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
    return (Path.cwd() / "containers", shipped("containers"))


def recipes() -> dict[str, Path]:
    """Every recipe by its name."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            found.setdefault(path.stem, path)
    return found


def read_recipe(word: str) -> Recipe:
    """The recipe called ``word``, or in the file ``word`` (anything with a ``/`` or ``.def``).

    Raises:
        RequestError: there is none of this name. ConfigError: it cannot be read.
    """
    is_path = "/" in word or word.endswith(SUFFIX)
    path = Path(word).expanduser().absolute() if is_path else recipes().get(word)
    if path is None:
        looked = ", ".join(str(folder) for folder in dict.fromkeys(recipe_folders()))
        raise RequestError(f"no recipe {word!r} in {looked}", hint=nearest(word, recipes()))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read: {reason_of(error)}") from error
    sections = _sections(text)
    files = (path.parent / line.split()[0] for line in sections.get("files", ()) if "{{" not in line.split()[0])
    about = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    return Recipe(path.stem, path, text, _arguments(path, sections), tuple(files), about)


def settled_arguments(recipe: Recipe, said: Mapping[str, str]) -> dict[str, str]:
    """The recipe's arguments with what was said over its defaults.

    Raises:
        RequestError: it has no such argument, or a value holds what Apptainer's templates cannot.
    """
    for name, value in said.items():
        if name not in recipe.arguments:
            raise RequestError(f"recipe {recipe.path} has no argument {name!r}", hint=nearest(name, recipe.arguments))
        if any(ord(char) < 32 for char in value) or "{{" in value or "}}" in value:
            raise RequestError(
                f"argument {name}={value!r}: neither control characters nor braces can stand in a recipe"
            )
    return {**recipe.arguments, **said}


def recipe_hash(recipe: Recipe, arguments: Mapping[str, str], base_digest: str | None) -> str:
    """Of everything an image depends on that is known here: recipe, arguments, files taken in, base.

    Raises:
        ConfigError: a file that the recipe takes in is not there.
    """
    told = hashlib.sha256(recipe.text.encode())
    for name in sorted(arguments):
        told.update(f"\0{name}={arguments[name]}".encode())
    for path in recipe.files:
        if not path.is_file():
            raise ConfigError(f"recipe {recipe.path}: %files: there is no file {path}")
        told.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    told.update(f"\0{base_digest}".encode())
    return told.hexdigest()[:16]


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of each section that hold something."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            lines = found.setdefault(match[1], [])
        elif lines is not None and line.strip() and not line.lstrip().startswith("#"):
            lines.append(line.strip())
    return found


def _arguments(path: Path, sections: Mapping[str, list[str]]) -> dict[str, str]:
    found = {}
    for line in sections.get("arguments", ()):
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"recipe {path}: %arguments: {line!r} is not NAME=VALUE")
        found[name] = value.strip('"')
    return found
