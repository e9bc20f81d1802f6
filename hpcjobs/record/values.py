"""Converts JSON into named tuples and checks every type: a file may come from another user or another version."""

import json
from enum import Enum
from typing import Any, Dict, Type, TypeVar, Union

from hpcjobs.files import AnyPath, read_regular

T = TypeVar("T")


def read_json(path: AnyPath, kind: Type[T]) -> T:
    """Read a file that holds one value.

    Raises:
        OSError: it cannot be read. ValueError: it holds another value.
    """
    return decode(read_regular(path), kind)


def decode(text: bytes, kind: Type[T]) -> T:
    """Decode a line or file as ``kind``.

    Raises:
        ValueError: it holds no JSON, or another value.
    """
    try:
        raw = json.loads(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return convert(raw, kind)


def convert(raw: Any, kind: Type[T]) -> T:
    """Convert a value of JSON's own types to ``kind``. Raises ValueError."""
    value: T = _convert(raw, kind, "the value")
    return value


def encode(value: Any) -> str:
    """The named tuple ``value`` as one line of JSON, without the end of the line."""
    return json.dumps(to_json(value), separators=(",", ":"))


def to_json(value: Any) -> Any:
    """Named tuples and enum members in ``value`` as JSON's own types."""
    if hasattr(value, "_fields"):
        return {name: to_json(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return value


def _convert(raw: Any, kind: Any, name: str) -> Any:
    options = getattr(kind, "__args__", None) if getattr(kind, "__origin__", None) is Union else None
    if options:
        return None if raw is None else _convert(raw, options[0], name)
    if hasattr(kind, "_fields"):
        return _convert_fields(raw, kind, name)
    if kind is float and type(raw) in (int, float):
        try:
            return float(raw)
        except OverflowError as error:
            raise ValueError(f"{name} is too large") from error
    if kind is int and type(raw) is float and raw.is_integer():  # 3.0: what a program of another language may write
        return int(raw)
    if getattr(kind, "__origin__", None) in (list, list) and isinstance(raw, list):
        return [_convert(item, kind.__args__[0], f"{name}[{number}]") for number, item in enumerate(raw)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(raw)  # a ValueError names the value
    if type(raw) is kind:
        return raw
    raise ValueError(f"{name} is {json.dumps(raw)[:80]}, expected {getattr(kind, '__name__', kind)}")


def _convert_fields(raw: Any, kind: Any, name: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is {json.dumps(raw)[:80]}, expected an object")
    values: Dict[str, Any] = {}
    for key, each in kind.__annotations__.items():
        if key in raw:
            values[key] = _convert(raw[key], each, key)
        elif key not in kind._field_defaults:
            raise ValueError(f"{key} is missing")
    return kind(**values)
