"""Converts JSON into named tuples and dataclasses and checks every type: a file may be another user's or version's.

Numbers that JSON lacks, NaN and the infinities, such as the loss of a run that diverges, are written as null, with
their names: ``"loss": null, "not_finite": {"loss": "NaN"}``. File names outside UTF-8 have surrogates in Python, and
JSON has no surrogates: they are written as text, ``\\udc80``.
"""

import json
import math
import os
import re
from collections import abc
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Tuple, Type, TypeVar, Union, get_type_hints

from hpcjobs.files import AnyPath, read_regular

NOT_FINITE = "not_finite"
_SURROGATE = re.compile("[\ud800-\udfff]")
_encode_line = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False).encode  # made once


def encode_object(value: Mapping[str, Any], *, indent: Optional[int] = None) -> str:
    """``value`` as JSON that every reader takes, without the end of the line."""
    encoder = _encode_line
    if indent is not None:
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, indent=indent).encode
    try:
        return _without_surrogates(encoder(value))
    except ValueError:  # the rare case, found by the encoder: looking at each number beforehand would cost more
        names: Dict[str, str] = {}
        cleaned = {key: _without_those(item, str(key), names) for key, item in value.items()}
        return _without_surrogates(encoder({NOT_FINITE: names, **cleaned}))  # a result of that name stays


def _without_surrogates(text: str) -> str:
    if len(text) == len(text.encode("utf-8", "surrogatepass")):  # ASCII alone
        return text
    return _SURROGATE.sub(lambda match: f"\\\\u{ord(match[0]):04x}", text)


def _without_those(value: Any, name: str, names: Dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        names[name] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return None
    if isinstance(value, Mapping):
        return {key: _without_those(item, f"{name}.{key}", names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_those(item, f"{name}.{index}", names) for index, item in enumerate(value)]
    return value


def decode_object(text: bytes) -> Optional[Dict[str, Any]]:
    """The object that a line or file holds, with its numbers that JSON does not have; None: it holds another value.

    Raises ValueError: it is no JSON. RecursionError: it is nested too deeply.
    """
    raw = json.loads(text.decode("utf-8"))  # which also reads a bare NaN, as other programs write it
    return restore(raw) if isinstance(raw, dict) else None


def restore(value: Dict[str, Any]) -> Dict[str, Any]:
    """Restore the numbers that `encode_object` replaced; changes and returns ``value``."""
    names = value.get(NOT_FINITE)
    if names and isinstance(names, dict) and all(text in ("NaN", "Infinity", "-Infinity") for text in names.values()):
        del value[NOT_FINITE]
        for name, text in names.items():
            _put(value, str(name), float(text))
    return value


def _put(value: Any, name: str, number: float) -> None:
    """Set the null of that name; a key may hold dots itself."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if str(key) == name and item is None:
            value[key] = number
            return
        if name.startswith(f"{key}."):
            _put(item, name[len(str(key)) + 1 :], number)


T = TypeVar("T")
# A generic type's origin is the class of `typing` in Python 3.6, and the built-in class since.
_TUPLES = (tuple, Tuple)
_LISTS = (list, List, *_TUPLES)
_MAPPINGS = (dict, Dict, abc.Mapping, Mapping)


def read_json(path: AnyPath, kind: Type[T]) -> T:
    """Read a file that holds one value. Raises OSError: it cannot be read. ValueError: it holds another value."""
    return decode(read_regular(path), kind)


def decode(text: bytes, kind: Type[T]) -> T:
    """Decode a line or file as ``kind``. Raises ValueError: it holds no JSON, or another value."""
    try:
        raw = json.loads(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return convert(raw, kind)


def convert(raw: Any, kind: Type[T]) -> T:
    """Convert a value of JSON's own types to ``kind``. Raises ValueError."""
    value: T = _convert(raw, kind, "the value")
    return value


def decode_kind(line: bytes, kind: str, to: Type[T]) -> Optional[T]:
    """Decode a line that has a ``kind``; None for another kind and for an incomplete line.

    Any program may write such lines: a value of another type counts as not written, if its field has a default.
    """
    try:
        raw = decode_object(line)
        if raw is None or raw.get("kind") != kind:
            return None
        value: T = _convert_fields(raw, to, kind, lenient=True)
        return value
    except (ValueError, RecursionError):
        return None


def encode(value: Any) -> str:
    """The named tuple ``value`` as one line of JSON, without the end of the line."""
    return json.dumps(to_json(value), separators=(",", ":"))


def to_json(value: Any) -> Any:
    """Named tuples, dataclasses and enum members in ``value`` as JSON's own types."""
    if hasattr(value, "_fields"):
        return {name: to_json(item) for name, item in value._asdict().items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


def _convert(raw: Any, kind: Any, name: str) -> Any:
    origin = getattr(kind, "__origin__", None)
    arguments: Tuple[Any, ...] = getattr(kind, "__args__", ())
    if kind is Any or type(raw) is kind or isinstance(kind, TypeVar):
        return raw
    if _is_union(kind):
        return _convert_option(raw, arguments, name)
    if hasattr(kind, "_fields") or hasattr(kind, "__dataclass_fields__"):
        return _convert_fields(raw, kind, name)
    if kind is float and type(raw) in (int, float):
        try:
            return float(raw)
        except OverflowError as error:
            raise ValueError(f"{name} is too large") from error
    if kind is int and type(raw) is float and raw.is_integer():  # a program in another language may write 3.0
        return int(raw)
    if origin in _LISTS and isinstance(raw, list):
        items = [_convert(item, arguments[0], f"{name}[{number}]") for number, item in enumerate(raw)]
        return tuple(items) if origin in _TUPLES else items
    if origin in _MAPPINGS and isinstance(raw, dict):
        return {key: _convert(item, arguments[1], f"{name}.{key}") for key, item in raw.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(raw)  # a ValueError names the value
    raise ValueError(f"{name} is {json.dumps(raw)[:80]}, expected {getattr(kind, '__name__', kind)}")


def _convert_option(raw: Any, kinds: Tuple[Any, ...], name: str) -> Any:
    options = [kind for kind in kinds if kind is not type(None)]
    if raw is None and len(options) < len(kinds):
        return None
    for kind in options[:-1]:
        with suppress(ValueError):
            return _convert(raw, kind, name)
    return _convert(raw, options[-1], name)


def _convert_fields(raw: Any, kind: Any, name: str, *, lenient: bool = False) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is {json.dumps(raw)[:80]}, expected an object")
    fields, required = _read_fields(kind)
    missing = [key for key in required if key not in raw]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    values: Dict[str, Any] = {}
    for key, (each, plain) in fields.items():
        if key not in raw:
            continue
        value = raw[key]
        if type(value) in plain:
            values[key] = value
        elif lenient and key not in required:
            with suppress(ValueError):
                values[key] = _convert(value, each, key)
        else:
            values[key] = _convert(value, each, key)
    return kind(**values)


@lru_cache(maxsize=None)
def _read_fields(kind: Any) -> Tuple[Dict[str, Tuple[Any, FrozenSet[type]]], List[str]]:
    """The fields of a type, each with the types that need no conversion, and the fields that have no default.

    Kept: the same types are read again for each job and each line.
    """
    if hasattr(kind, "_fields"):
        required = [name for name in kind._fields if name not in kind._field_defaults]
    else:
        fields = kind.__dataclass_fields__.values()
        required = [field.name for field in fields if field.default is field.default_factory]  # both are MISSING
    return {name: (each, frozenset(_list_plain(each))) for name, each in get_type_hints(kind).items()}, required


def _list_plain(kind: Any) -> List[type]:
    if _is_union(kind):
        return [plain for option in kind.__args__ for plain in _list_plain(option)]
    return [kind] if kind in (bool, int, float, str, type(None)) else []


def _is_union(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is Union or type(kind).__name__ == "UnionType"


def read_count(text: str, *, digits: int = 18) -> Optional[int]:
    """A whole number that is not negative; None: another text, or one of more digits, which no count of ours has.

    Text of others: Python refuses to read thousands of digits, and tables have no room for more than 18.
    """
    return int(text) if re.match(rf"[0-9]{{1,{digits}}}\Z", text) else None


def read_text(path: str) -> str:
    """The text of ``path``, empty if it does not exist. Raises OSError if it cannot be read."""
    try:
        return read_regular(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def remove(path: str) -> None:
    """Remove ``path`` if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(path)
