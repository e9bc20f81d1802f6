"""Reads YAML files: through a cache, by type, and with the files that they extend."""

from __future__ import annotations

import marshal
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.files import cache_dir, make_folder, write_beside
from hpcjobs.site.checks import check_name
from hpcjobs.site.search import find_parent

_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping (KEY: VALUE)",
    "null": "nothing",
}
_MISMATCH = re.compile(r"Expected `([a-z| ]+)`, got `([a-z]+)`\Z")
_ENUM = re.compile(r"Invalid enum value (.+)\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z")
_UNQUOTED = ("int", "float", "bool")
"""Types that YAML reads from a value without quotes."""


def in_plain_words(message: str) -> str:
    """``message`` of a `msgspec.ValidationError`, without the names that JSON and Python have for types."""
    if match := _ENUM.match(message):
        return f"{match[1]} is not one of the allowed values"
    if match := _UNKNOWN.match(message):
        return f"{match[1]!r} is not known"
    match = _MISMATCH.match(message)
    if match is None:
        return message
    expected = [_TYPES.get(name, name) for name in match[1].split(" | ") if name != "null"]
    return f"expected {' or '.join(expected)}, got {_TYPES.get(match[2], match[2])}"


def is_unquoted_text(message: str) -> bool:
    """Whether a value must be text and lacks the quotes that make it text to YAML."""
    match = _MISMATCH.match(message)
    return match is not None and "str" in match[1].split(" | ") and match[2] in _UNQUOTED


def words_of_switches(tree: Any) -> Any:
    """``tree`` with ``on`` or ``off`` for the true or false that YAML reads from these words, where a key has them."""
    if not isinstance(tree, Mapping):
        return tree
    switches = {True: "on", False: "off"}
    return {
        key: switches[value] if key == "retries" and isinstance(value, bool) else value for key, value in tree.items()
    }


_MOST_FILES = 16


def read_tree(path: Path, text: str) -> Any:
    """Return the content of the file ``path`` with the text ``text``. Raises ConfigError: it is not YAML."""
    cache = cache_dir() / f"yaml-{sys.implementation.cache_tag}"
    trees: dict[str, tuple[str, Any]] = {}
    with suppress(OSError, ValueError, EOFError, TypeError):  # no cache, or half of one
        trees = marshal.loads(cache.read_bytes())
    cached_text, tree = trees.pop(str(path), (None, None))
    if cached_text == text:
        return tree
    from hpcjobs.site.yaml_text import parse

    tree = parse(path, text)
    newest = dict([*trees.items(), (str(path), (text, tree))][-_MOST_FILES:])
    with suppress(OSError, ValueError):  # a home that cannot be written, or a date: it costs time, not the job
        make_folder(cache.parent)
        write_beside(cache, marshal.dumps(newest), durable=False)
    return tree


T = TypeVar("T", bound=msgspec.Struct)
MOST_BYTES = 1 << 20


class YamlFile(NamedTuple):
    """A file, and the tree that its text stands for; an empty file is an empty mapping."""

    path: Path
    text: str
    tree: Any


def read_yaml(path: Path, kind: type[T], *, what: str = "file", prepare: Callable[[Any], Any] = lambda tree: tree) -> T:
    """Read a ``kind`` from the YAML file ``path``; ``what`` names it in the message if the file is missing.

    ``prepare`` makes the tree of a ``kind`` from another spelling of it.

    Raises ConfigError: unreadable, no YAML, or not a ``kind``; names file, line and key.
    """
    with suppress(OSError, ValueError):  # an impossible name: `read_file` explains it
        if not path.exists() or path.is_dir():
            problem = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise ConfigError(f"{what} {path.absolute()} {problem}")
    file = read_file(path)
    return convert_tree(prepare(file.tree), kind, [file])


def read_file(path: Path) -> YamlFile:
    """The file ``path``. Raises ConfigError: unreadable, or no YAML; names file and line."""
    text = _text(path)
    tree = read_tree(path, text)
    return YamlFile(path, text, {} if tree is None else tree)


def convert_tree(tree: Any, kind: type[T], files: Sequence[YamlFile]) -> T:
    """Convert ``tree``, merged from ``files`` with the first winning, to a ``kind``.

    Raises ConfigError: the tree has the wrong type; names the file, the line and the key.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        from hpcjobs.site.yaml_text import locate_error

        raise locate_error(files, tree, kind, error) from error


def find_source(files: Sequence[YamlFile], steps: Sequence[str | int]) -> YamlFile:
    """Return the file with the value at ``steps``: the first of the files that lead furthest along them."""
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


Steps = tuple[str | int, ...]
"""The keys that lead to a value, from the outermost on."""


def read_chain(path: Path) -> tuple[YamlFile, ...]:
    """The site file ``path``, then the file that it extends, and so on.

    Raises ConfigError: a file cannot be read, a parent is missing, or a file extends itself; names file and line.
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
    """Merge ``files`` into one tree; each extends the next one.

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


def write_flow(value: object) -> str:
    """``value`` in one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
