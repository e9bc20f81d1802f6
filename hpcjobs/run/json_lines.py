"""Files of one JSON object per line, as programs and samplers append them: first and last lines, decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcjobs.files import open_regular
from hpcjobs.runtime.numbers import restore

T = TypeVar("T")
_END_BYTES = 1 << 16


def first_line(path: Path) -> bytes:
    """The first line of a file; empty where it is not there."""
    try:
        with open_regular(path) as file:
            return file.readline(_END_BYTES)
    except OSError:  # removed meanwhile: as if it had not begun
        return b""


def last_lines(path: Path) -> list[bytes]:
    """The lines of the last 64 KiB; the first of them may be the end of one."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            return file.read().splitlines()
    except OSError:  # not there yet
        return []


def decode_object(text: bytes) -> dict[str, Any] | None:
    """The object that a line or file holds, with its numbers that JSON does not have; None: it holds another value.

    Raises:
        ValueError: it is no JSON. RecursionError: it is nested too deeply.
    """
    raw = json.loads(text)  # which also reads a bare NaN, as other programs write it
    return restore(raw) if isinstance(raw, dict) else None


def decode_line(line: bytes, type: type[T], *, kind: str) -> T | None:
    """The line as ``type``; None for a line of another kind, or one that is cut off."""
    try:
        raw = decode_object(line)
        if raw is None or raw.get("kind") != kind:
            return None
        for name in ("step", "total_steps"):  # programs write 3.0 too
            if isinstance(raw.get(name), float) and raw[name].is_integer():
                raw[name] = int(raw[name])
        return msgspec.convert(raw, type)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
