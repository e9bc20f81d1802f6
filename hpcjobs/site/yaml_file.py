"""YAML files into frozen values."""

from __future__ import annotations

import marshal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.files import cache_dir, write_beside

T = TypeVar("T", bound=msgspec.Struct)
MOST_BYTES = 1 << 20
_KEPT = 16
"""Files whose trees are remembered."""


def read_yaml(path: Path, kind: type[T]) -> T:
    """The ``kind`` written in the YAML file ``path``.

    Raises:
        ConfigError: unreadable, no YAML, or not a ``kind``; names file, line and key.
    """
    text = _text(path)
    tree = _tree(path, text)
    try:
        return msgspec.convert(tree if tree is not None else {}, kind)
    except msgspec.ValidationError as error:
        from hpcjobs.site.yaml_text import located

        raise located(path, text, tree, kind, error) from error


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


def _tree(path: Path, text: str) -> Any:
    """What ``text`` says. It is remembered: importing the parser takes longer than all else done with a file."""
    memory = cache_dir() / f"yaml-{sys.implementation.cache_tag}"
    kept: dict[str, tuple[str, Any]] = {}
    with suppress(OSError, ValueError, EOFError, TypeError):  # nothing is remembered, or half of it
        kept = marshal.loads(memory.read_bytes())
    said, tree = kept.pop(str(path), (None, None))
    if said == text:
        return tree
    from hpcjobs.site.yaml_text import parse

    tree = parse(path, text)
    newest = dict([*kept.items(), (str(path), (text, tree))][-_KEPT:])
    with suppress(OSError, ValueError):  # a home that cannot be written, or a date: it costs time, not the job
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_beside(memory, marshal.dumps(newest), durable=False)
    return tree
