"""YAML text into trees, and errors that name file, line, key and the nearest known key."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hpcjobs.errors import ConfigError, nearest
from hpcjobs.site.models import OF_THE_LOADER
from hpcjobs.site.yaml_file import YamlFile, find_source, in_plain_words, is_unquoted_text

_Fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PATH = re.compile(r"(?P<message>.*) - at `(?P<path>[^`]*)`\Z", re.DOTALL)
_OCTAL = re.compile(r"[-+]?0_*[0-7]")
_MEMORY = re.compile(r"(?:max_)?mem(?:_per_\w+)?\Z", re.ASCII)
_OF_THE_LOADER = set(OF_THE_LOADER) - {"name"}  # no file may have them
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z")


MOST_VALUES = 50_000
"""Values of one file, each counted as often as anchors repeat it: more would take seconds."""
MOST_LEVELS = 50
"""Levels of nesting: PyYAML's parser in C crashes on some ten thousand."""
_MOST_SHOWN = 40
_LONGEST_MESSAGE = 1000


class _Loader(_Fastest):  # type: ignore[misc]
    """Refuses duplicate keys, which YAML accepts, and names the line of an invalid value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong("a key is text, not a list or a mapping", key.start_mark)
            if key.value in seen and key.value != "<<":
                raise _wrong(f"key {_short(key.value)} stands here twice", key.start_mark)
            seen.add(key.value)
            # A number is read as one is meant; ``no`` and a date are not.
            if key.value != "<<" and type(value := self.construct_object(key)) not in (str, int, float):
                kind = type(value).__name__
                raise _wrong(f"key {_short(key.value)} is no text to YAML ({kind}): write it in quotes", key.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # PyYAML's constructors raise whatever int(), float() and datetime() do
            kind = str(node.tag).rpartition(":")[2]
            raise _wrong(f"{_short(node.value)} cannot be read as {kind}", node.start_mark) from error
        if isinstance(value, int) and _OCTAL.match(node.value):
            hint = "without the leading 0, or as text in quotes"
            raise _wrong(f"{_short(node.value)} is octal to YAML, {value}: write it {hint}", node.start_mark)
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise _wrong(f"{_short(node.value)} is too large a number", node.start_mark)
        if isinstance(value, (set, bytes)):
            raise _wrong("only text, numbers, true, false, null, lists and mappings are understood", node.start_mark)
        return value


def _wrong(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _short(value: object) -> str:
    shown = value if isinstance(value, str) else type(value).__name__
    return repr(shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…")


def _check_size(text: str) -> None:
    """Refuse text that is slow to build or cannot be stored (yaml.YAMLError), before anything is built.

    Anchors make a few lines stand for millions of values. Each anchor's size is counted once, from the sizes of those
    that it repeats, so counting takes no longer than reading.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, Loader=_Fastest):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, total))
            if len(open_nodes) > MOST_LEVELS:
                raise _wrong(f"more than {MOST_LEVELS} levels of nesting", event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - before + 1
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise _wrong(f"anchor {_short(event.anchor)} stands within itself", event.start_mark)
            total += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in event.value):
                raise _wrong("a NUL byte, or half a character, is no text", event.start_mark)
            sizes[event.anchor or ""] = 1
            total += 1
        if total > MOST_VALUES:
            raise _wrong(f"more than {MOST_VALUES:,} values, counting what anchors repeat", event.start_mark)


def parse(path: Path, text: str) -> Any:
    """Parse ``text``, which was read from ``path``.

    Raises ConfigError: no YAML, or larger than a configuration can be; names file and line.
    """
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", None) or 0) + 1
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{path}:{line}: not valid YAML: {problem}") from error


def locate_error(
    files: Sequence[YamlFile], tree: Any, kind: type[msgspec.Struct], error: msgspec.ValidationError
) -> ConfigError:
    """Describe ``error`` of ``tree``, merged from ``files`` with the first winning: file, line and key."""
    match = _PATH.match(str(error))
    message, steps = (match["message"], _steps(match["path"])) if match else (str(error), [])
    steps = _without_wildcards(tree, kind, steps, str(error))
    first, _, rest = message.partition(" ")
    own = _own_steps(_dig(tree, steps), first.rstrip(":"))  # named by the value's own check
    if own:
        steps, message = [*steps, *own], rest if first.endswith(":") else message
    unknown = _UNKNOWN.match(message)
    hint = None
    if unknown:
        owner = _struct_at(kind, steps)
        steps = [*steps, unknown[1]]
        message = "unknown key"
        hint = _hint_of_unknown(owner, unknown[1]) if owner else None
    elif steps and str(steps[-1]).startswith(("time", "max_time")):
        hint = "a time limit is quoted text with a unit: '2h', '90m', '1-12:00:00' (bare 12:30:00 is 45000 to YAML)"
    elif steps and "Expected `str" in message and _MEMORY.match(str(steps[-1])):
        hint = "memory is text with a unit: '64G'; the megabytes that sinfo prints are '192000M'"
    elif is_unquoted_text(message):
        text = _scalar_at(find_source(files, steps).text, steps)
        hint = f"write the value in quotes: '{_dig(tree, steps) if text is None else text}'"
    elif message.startswith("Invalid enum value") and (arguments := _words_at(kind, steps)):
        hint = nearest(message.split("'")[1] if "'" in message else "", arguments)
    file = find_source(files, steps)
    line = line_of(file.text, steps)
    key = ".".join(str(step) for step in steps) or "the file"
    return ConfigError(f"{file.path}:{line}: {key}: {_cut(in_plain_words(message))}", hint=hint)


def _hint_of_unknown(owner: type[msgspec.Struct], key: str) -> str | None:
    removed: Mapping[str, str] = getattr(owner, "REMOVED", {})
    field = key.replace("-", "_")
    for group in owner.__struct_fields__:
        below = getattr(_struct_at(owner, [group]), "__struct_fields__", ())
        if field in below and field not in owner.__struct_fields__ and key not in removed:
            return f"write {field!r} below {group!r}: `{group}: {{{field}: ...}}`"
    return removed.get(key) or nearest(key, set(owner.__struct_fields__) - _OF_THE_LOADER)


def _cut(message: str) -> str:
    """``message``, without most of a value that fills the screen."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE // 2]} … {message[-200:]}"


def _own_steps(value: Any, keys: str) -> list[str | int]:
    """The keys below ``value`` that ``keys`` (``qos.normal``) names; none if there are none such."""
    steps: list[str | int] = []
    for key in keys.split("."):
        if not isinstance(value, dict) or key not in value:
            break
        steps.append(key)
        value = value[key]
    return steps


def _steps(path: str) -> list[str | int]:
    """``$.partitions[...].node`` -> ``['partitions', '...', 'node']``."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", path)
    return [name if name else (int(index) if index.isdigit() else index) for name, index in parts]


def _without_wildcards(tree: Any, kind: type[msgspec.Struct], steps: list[str | int], error: str) -> list[str | int]:
    """The same path with each ``...`` (some key of a mapping) replaced by the key that is at fault."""
    if "..." not in steps:
        return steps
    at = steps.index("...")
    parent = _dig(tree, steps[:at])
    for key in parent if isinstance(parent, dict) else ():
        candidate = [*steps[:at], key, *steps[at + 1 :]]
        only = _replace_at(tree, steps[:at], {key: parent[key]})
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


def _replace_at(tree: Any, steps: list[str | int], value: Any) -> Any:
    if not steps:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[steps[0]] = _replace_at(tree[steps[0]], steps[1:], value)  # type: ignore[index]
    return copy


def _type_at(kind: type[msgspec.Struct], steps: list[str | int]) -> Any:
    """The type that the value at ``steps`` is converted to."""
    current: Any = kind
    for step in steps:
        structs = [current, *typing.get_args(current)]
        struct = next((s for s in structs if hasattr(s, "__struct_fields__")), None)
        if struct is not None and step in struct.__struct_fields__:
            current = typing.get_type_hints(struct)[str(step)]
        else:
            current = next(part for part in reversed(typing.get_args(current)) if part is not Ellipsis)
    return current


def _words_at(kind: type[msgspec.Struct], steps: list[str | int]) -> list[str]:
    """The words that the value at ``steps`` is one of."""
    current = _type_at(kind, steps)
    literals = [part for part in (current, *typing.get_args(current)) if typing.get_origin(part) is typing.Literal]
    return [str(literal) for part in literals for literal in typing.get_args(part)]


def _struct_at(kind: type[msgspec.Struct], steps: list[str | int]) -> type[msgspec.Struct] | None:
    """The Struct that the value at ``steps`` is converted to."""
    current = _type_at(kind, steps)
    return next((s for s in [current, *typing.get_args(current)] if hasattr(s, "__struct_fields__")), None)


def line_of(text: str, steps: Sequence[str | int]) -> int:
    """Return the line (from 1) of the deepest existing key of ``steps`` in ``text``."""
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


def _scalar_at(text: str, steps: Sequence[str | int]) -> str | None:
    """Return the value at ``steps`` as the file has it; None: the file has no single value there."""
    node = yaml.compose(text, Loader=_Loader)
    for step in steps:
        node = next((value for key, value, _ in _children(node) if key == step), None)
    return node.value if isinstance(node, yaml.ScalarNode) else None


def list_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the line of each key in ``text``, by the path of keys; the file itself has line 1."""
    lines: dict[tuple[str | int, ...], int] = {(): 1}
    nodes: list[tuple[tuple[str | int, ...], yaml.Node | None]] = [((), yaml.compose(text, Loader=_Loader))]
    while nodes:
        steps, node = nodes.pop()
        for key, value, line in _children(node):
            path = (*steps, key)
            lines[path] = line
            nodes.append((path, value))
    return lines


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, yaml.Node, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.value, value, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield index, value, value.start_mark.line + 1
