"""Writes numbers that JSON lacks, NaN and the infinities, such as the loss of a run that diverges.

They are written as null, with their names: ``"loss": null, "not_finite": {"loss": "NaN"}``. File names outside UTF-8
have surrogates in Python, and JSON has no surrogates: they are written as text, ``\\udc80``.
"""

import json
import math
import re
from typing import Any, Dict, Mapping, Optional

NOT_FINITE = "not_finite"
_SURROGATE = re.compile("[\ud800-\udfff]")
_encode_line = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False).encode  # made once


def encode(value: Mapping[str, Any], *, indent: Optional[int] = None) -> str:
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

    Raises:
        ValueError: it is no JSON. RecursionError: it is nested too deeply.
    """
    raw = json.loads(text.decode("utf-8"))  # which also reads a bare NaN, as other programs write it
    return restore(raw) if isinstance(raw, dict) else None


def restore(value: Dict[str, Any]) -> Dict[str, Any]:
    """Restore the numbers that `encode` replaced; changes and returns ``value``."""
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
