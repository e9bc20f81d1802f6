"""YAML text into trees, and errors that name file, line, key and the nearest known key."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hpcjobs.errors import ConfigError, nearest

_Fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PATH = re.compile(r"(?P<message>.*) - at `(?P<path>[^`]*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z")


class _Loader(_Fastest):  # type: ignore[misc]
    """YAML lets the last of two equal keys win in silence; here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                problem = f"key {key.value!r} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def parse(path: Path, text: str) -> Any:
    """The tree that stands in ``text``, which was read from ``path``.

    Raises:
        ConfigError: no YAML; names file and line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def located(
    path: Path, text: str, tree: Any, kind: type[msgspec.Struct], error: msgspec.ValidationError
) -> ConfigError:
    """``error`` with the file, the line and the key it is about."""
    match = _PATH.match(str(error))
    message, steps = (match["message"], _steps(match["path"])) if match else (str(error), [])
    steps = _without_wildcards(tree, kind, steps, str(error))
    word, _, rest = message.partition(" ")
    if isinstance(at := _dig(tree, steps), dict) and word.rstrip(":") in at:  # said by the value's own check
        steps, message = [*steps, word.rstrip(":")], rest if word.endswith(":") else message
    unknown = _UNKNOWN.match(message)
    hint = None
    if unknown:
        owner = _struct_at(kind, steps)
        steps = [*steps, unknown[1]]
        message = "unknown key"
        hint = nearest(unknown[1], owner.__struct_fields__) if owner else None
    elif steps and str(steps[-1]).startswith(("time", "max_time")):
        hint = "a time limit is quoted text with a unit: '2h', '90m', '1-12:00:00' (bare 12:30:00 is 45000 to YAML)"
    line = line_of(text, steps)
    key = ".".join(str(step) for step in steps) or "the file"
    return ConfigError(f"{path}:{line}: {key}: {message}", hint=hint)


def _steps(path: str) -> list[str | int]:
    """``$.partitions[...].node`` -> ``['partitions', '...', 'node']``."""
    found = re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", path)
    return [name if name else (int(index) if index.isdigit() else index) for name, index in found]


def _without_wildcards(tree: Any, kind: type[msgspec.Struct], steps: list[str | int], error: str) -> list[str | int]:
    """The same path with each ``...`` (some key of a mapping) replaced by the key that is at fault."""
    if "..." not in steps:
        return steps
    at = steps.index("...")
    parent = _dig(tree, steps[:at])
    for key in parent if isinstance(parent, dict) else ():
        candidate = [*steps[:at], key, *steps[at + 1 :]]
        only = _replaced(tree, steps[:at], {key: parent[key]})
        try:
            msgspec.convert(only, kind)
        except msgspec.ValidationError as again:
            if str(again) == error:
                return _without_wildcards(only, kind, candidate, error)
    return steps[:at]


def _dig(tree: Any, steps: list[str | int]) -> Any:
    for step in steps:
        tree = tree[step]
    return tree


def _replaced(tree: Any, steps: list[str | int], value: Any) -> Any:
    if not steps:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[steps[0]] = _replaced(tree[steps[0]], steps[1:], value)  # type: ignore[index]
    return copy


def _struct_at(kind: type[msgspec.Struct], steps: list[str | int]) -> type[msgspec.Struct] | None:
    """The Struct that the value at ``steps`` is converted to."""
    current: Any = kind
    for step in steps:
        structs = [current, *typing.get_args(current)]
        struct = next((s for s in structs if hasattr(s, "__struct_fields__")), None)
        if struct is not None and step in struct.__struct_fields__:
            current = typing.get_type_hints(struct)[str(step)]
        else:
            current = typing.get_args(current)[-1]
    return next((s for s in [current, *typing.get_args(current)] if hasattr(s, "__struct_fields__")), None)


def line_of(text: str, steps: Sequence[str | int]) -> int:
    """Line (from 1) of the deepest key of ``steps`` that stands in ``text``."""
    node = yaml.compose(text, Loader=_Loader)
    line = 1
    for step in steps:
        for key, value, start in _children(node):
            if key == step:
                node, line = value, start
                break
        else:
            return line
    return line


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, yaml.Node, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.value, value, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield index, value, value.start_mark.line + 1
