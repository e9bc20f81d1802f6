"""YAML files into frozen values."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.site.yaml_cache import read_tree

T = TypeVar("T", bound=msgspec.Struct)
MOST_BYTES = 1 << 20


def read_yaml(path: Path, kind: type[T]) -> T:
    """The ``kind`` written in the YAML file ``path``.

    Raises:
        ConfigError: unreadable, no YAML, or not a ``kind``; names file, line and key.
    """
    text = _text(path)
    tree = read_tree(path, text)
    try:
        return msgspec.convert(tree if tree is not None else {}, kind)
    except msgspec.ValidationError as error:
        from hpcjobs.site.yaml_text import locate_error

        raise locate_error(path, text, tree, kind, error) from error


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
