"""Sweeps over a Python function: pickled once; each cell's line in cells.sh has its keywords, like any parameters."""

from __future__ import annotations

import base64
import hashlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
from msgspec.structs import replace

from hpcjobs.errors import RequestError
from hpcjobs.sweeps.cells import Cell, Point, Program, check_points, format_value, make_cell
from hpcjobs.units import human_bytes

LARGEST_ARGUMENTS, LARGEST_FUNCTION = 64 << 10, 64 << 20
"""Bytes of a cell's keywords (a variable of the environment holds 128 KiB), and of the function itself."""
CALL_MODULE = ("hpcjobs.runtime.call",)


def pickle_function(function: Callable[..., object]) -> bytes:
    """The function as the cells will load it.

    Raises:
        RequestError: it cannot be pickled (it holds an open file, a lock, a GPU tensor ...), or is too large.
    """
    data = _pickle(function, f"function {name_of(function)}")
    if len(data) > LARGEST_FUNCTION:
        raise RequestError(
            f"function {name_of(function)} takes {human_bytes(len(data))} with what it refers to;"
            f" the limit is {human_bytes(LARGEST_FUNCTION)}",
            hint="load data inside the function",
        )
    return data


def arguments(point: Point) -> str:
    """A cell's keywords for its line of shell.

    Raises:
        RequestError: not picklable, or too large.
    """
    data = _pickle(dict(point), f"the arguments {', '.join(point)}")
    if len(data) > LARGEST_ARGUMENTS:
        raise RequestError(
            f"the arguments {', '.join(point)} of a cell take {human_bytes(len(data))};"
            f" the limit is {human_bytes(LARGEST_ARGUMENTS)}",
            hint="write them to a file and pass its path",
        )
    return base64.b64encode(data).decode()


def _pickle(value: object, what: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # pickling runs code of the user's
        raise RequestError(
            f"{what} cannot be pickled: {error}", hint="open files and locks inside the function"
        ) from error
    return data


def name_of(function: Callable[..., object]) -> str:
    """``train`` of ``train``, ``functools.partial(train)`` and of an instance of ``Train``."""
    inner = getattr(function, "func", function)
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return re.sub(r"\W", "", name, flags=re.ASCII) or "function"


def identity_of(function: Callable[..., object]) -> str:
    """Hash of the function's code, independent of its place in the file; for other callables, hash of the pickle."""
    digest = hashlib.sha256(name_of(function).encode())
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        _add_code(digest, code)
        digest.update(repr(getattr(function, "__defaults__", None)).encode())
        closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        digest.update(_pickle(closure, f"what {name_of(function)} refers to") if closure else b"")
    else:
        digest.update(_pickle(function, f"function {name_of(function)}"))
    return digest.hexdigest()


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def cells_of(function: Callable[..., object], points: Sequence[Point]) -> list[Cell]:
    """One cell per point. Values other than text and numbers are identified by their pickle and shown by their repr."""
    what = Program(argv=(), identity=identity_of(function), passing="env", trainer=False)
    cells: dict[str, Cell] = {}
    for point in check_points(points):
        keys = {name: _make_key(name, value) for name, value in point.items()}
        shown = {name: _describe_value(name, value) for name, value in point.items()}
        cell = replace(make_cell(what, keys), params=shown, arguments=arguments(point))
        cells.setdefault(cell.id, cell)
    return list(cells.values())


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _make_key(name: str, value: object) -> object:
    return value if _is_plain(value) else hashlib.sha256(_pickle(value, f"parameter {name}")).hexdigest()


def _describe_value(name: str, value: object) -> str | None:
    return format_value(name, value) if _is_plain(value) else repr(value)[:80]
