"""Reads YAML files into frozen values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.site.yaml_cache import read_tree

T = TypeVar("T", bound=msgspec.Struct)
MOST_BYTES = 1 << 20


class YamlFile(NamedTuple):
    """A file, and the tree that its text stands for; an empty file is an empty mapping."""

    path: Path
    text: str
    tree: Any


def read_yaml(path: Path, kind: type[T], *, what: str = "file", prepare: Callable[[Any], Any] = lambda tree: tree) -> T:
    """The ``kind`` written in the YAML file ``path``; ``what`` it is, for the message where there is none.

    ``prepare`` makes the tree of a ``kind`` from another spelling of it.

    Raises:
        ConfigError: unreadable, no YAML, or not a ``kind``; names file, line and key.
    """
    with suppress(OSError, ValueError):  # a name that cannot even be looked up: `read_file` says why
        if not path.exists() or path.is_dir():
            problem = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise ConfigError(f"{what} {path.absolute()} {problem}")
    file = read_file(path)
    return convert_tree(prepare(file.tree), kind, [file])


def read_file(path: Path) -> YamlFile:
    """The file ``path``.

    Raises:
        ConfigError: unreadable, or no YAML; names file and line.
    """
    text = _text(path)
    tree = read_tree(path, text)
    return YamlFile(path, text, {} if tree is None else tree)


def convert_tree(tree: Any, kind: type[T], files: Sequence[YamlFile]) -> T:
    """``tree``, merged from ``files``, of which the first wins, as a ``kind``.

    Raises:
        ConfigError: it is none; names the file, the line and the key.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        from hpcjobs.site.yaml_text import locate_error

        raise locate_error(files, tree, kind, error) from error


def find_source(files: Sequence[YamlFile], steps: Sequence[str | int]) -> YamlFile:
    """The file whose value at ``steps`` counts: of those that lead furthest along them, the first."""
    return max(files, key=lambda file: _depth(file.tree, steps))


def _depth(tree: Any, steps: Sequence[str | int]) -> int:
    for depth, step in enumerate(steps):
        is_there = step in tree if isinstance(tree, dict) else isinstance(tree, list) and step in range(len(tree))
        if not is_there:
            return depth
        tree = tree[step]
    return len(steps)


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe of that name would be waited for
            raise ConfigError(f"{path}: cannot be read: it is no file")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}:1: larger than {MOST_BYTES >> 10} KiB, which is no configuration")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path.absolute()} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
