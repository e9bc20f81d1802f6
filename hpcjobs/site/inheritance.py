"""A site file on top of others (``extends``), and where each of its keys was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcjobs.errors import ConfigError
from hpcjobs.site.checks import check_name
from hpcjobs.site.search import find_parent
from hpcjobs.site.yaml_file import YamlFile, find_source, read_file

Steps = tuple[str | int, ...]
"""The keys that lead to a value, from the outermost on."""


def read_chain(path: Path) -> tuple[YamlFile, ...]:
    """The site file ``path``, then the file that it extends, and so on.

    Raises:
        ConfigError: a file cannot be read, a parent is missing, or a file extends itself; names file and line.
    """
    files = [read_file(path)]
    while isinstance(files[-1].tree, dict) and isinstance(name := files[-1].tree.get("extends"), str):
        child = files[-1]
        try:
            check_name(name, "extends:")
            parent = find_parent(name, child.path)
        except ValueError as error:
            raise ConfigError(f"{where_of(child, ('extends',))}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{where_of(child, ('extends',))}: {error.message}", hint=error.hint) from error
        if any(parent.samefile(file.path) for file in files):
            circle = " -> ".join(str(file) for file in (*(file.path for file in files), parent))
            raise ConfigError(f"{where_of(child, ('extends',))}: extends: the files extend each other: {circle}")
        files.append(read_file(parent))
        if not isinstance(files[-1].tree, dict):
            raise ConfigError(f"{parent}:1: the file: expected a mapping (KEY: VALUE)")
    return tuple(files)


def merge_trees(files: Sequence[YamlFile]) -> Any:
    """One tree of ``files``, each of which extends the next one.

    The rule: mappings are merged key by key, at every depth; any other value, a list or null too, replaces the
    parent's.
    """
    tree = files[-1].tree
    for file in reversed(files[:-1]):
        tree = _merge(tree, file.tree)
    return tree


def _merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _merge(below[key], value) if key in below else value for key, value in above.items()}}


def list_origins(files: Sequence[YamlFile]) -> dict[Steps, str]:
    """``file:line`` of each value that ``files`` say, by its keys; a list is one value."""
    from hpcjobs.site.yaml_text import list_lines

    lines = {file.path: list_lines(file.text) for file in files}
    origins = {}
    for steps in _leaves(merge_trees(files)):
        file = find_source(files, steps)
        known = next(known for end in range(len(steps), -1, -1) if (known := steps[:end]) in lines[file.path])
        origins[steps] = f"{file.path}:{lines[file.path][known]}"
    return origins


def _leaves(tree: Any, steps: Steps = ()) -> Iterator[Steps]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*steps, key))
    else:
        yield steps


def where_of(file: YamlFile, steps: Sequence[str | int]) -> str:
    """``file:line`` of the key at ``steps``."""
    from hpcjobs.site.yaml_text import line_of

    return f"{file.path}:{line_of(file.text, steps)}"
