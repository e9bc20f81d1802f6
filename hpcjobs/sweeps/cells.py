"""Builds a cell from a program and a point: its identity, its command, its line of shell."""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from hpcjobs import __version__
from hpcjobs.errors import RequestError, reason_of
from hpcjobs.job.models import Job
from hpcjobs.job.program import split_module
from hpcjobs.site.models import Frozen
from hpcjobs.units import MAX_TASKS

Point = Mapping[str, Any]
"""The parameters of one cell, by name."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z", re.ASCII)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)\Z", re.ASCII)
_DIGITS = 18
"""Digits of a number in ``0..9``."""


def grid(**axes: Iterable[Any]) -> list[Point]:
    """Every combination; the last axis changes fastest."""
    return grid_of(axes)


def grid_of(axes: Mapping[str, Iterable[Any]]) -> list[Point]:
    """`grid` for names that Python has no keyword for."""
    values = {name: _values(axis) for name, axis in axes.items()}
    check_count(*map(len, values.values()))
    return check_points(
        [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    )


def _values(axis: Iterable[Any]) -> list[Any]:
    """The values of an axis, which may be a range or a generator of any length.

    Raises RequestError: no list, or more than a sweep may have cells.
    """
    if isinstance(axis, str) or not isinstance(axis, Iterable):
        raise RequestError(f"the values of a parameter are a list, not {axis!r}", hint=f"[{axis!r}] is a list of one")
    values = list(itertools.islice(axis, MAX_TASKS + 1))
    check_count(len(values))
    return values


def check_count(*factors: int) -> None:
    """Check the number of cells, the product of ``factors``, before they are made.

    Raises RequestError: more than a sweep may have.
    """
    if (cells := math.prod(factors)) > MAX_TASKS:
        product = " x ".join(map(str, factors)) + " = " if len(factors) > 1 else ""
        raise RequestError(
            f"a sweep has at most {MAX_TASKS} cells; these are {product}{cells} or more",
            hint="fewer values per axis, a random sample of them (sample:), or several sweeps",
        )


def zip_(**axes: Iterable[Any]) -> list[Point]:
    """The first values together, the second values together, and so on.

    Raises RequestError: axes of different lengths.
    """
    values = {name: _values(axis) for name, axis in axes.items()}
    lengths = {name: len(axis) for name, axis in values.items()}
    if len(set(lengths.values())) > 1:
        lengths_text = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise RequestError(f"axes that go together are of one length: {lengths_text}")
    return check_points([dict(zip(values, together, strict=True)) for together in zip(*values.values(), strict=True)])


def sample(
    n: int, seed: int = 0, **space: Sequence[Any] | tuple[float, float] | tuple[float, float, str]
) -> list[Point]:
    """``n`` random points: a list is chosen from, ``(low, high)`` is uniform (whole numbers if both are),
    ``(low, high, "log")`` is uniform in the logarithm. The same seed gives the same points; more of them
    begin with the same ones."""
    check_count(n)
    draw = random.Random(seed)
    return check_points([{name: _draw(draw, axis) for name, axis in space.items()} for _ in range(n)])


def _draw(draw: random.Random, axis: Sequence[Any]) -> Any:
    if not isinstance(axis, tuple):
        return draw.choice(axis)
    low, high, *scale = axis
    if not low <= high:
        raise RequestError(f"sample: low={low} is above high={high}")
    if scale == ["log"]:
        if low <= 0:
            raise RequestError(f"sample: low={low} has no logarithm; write a number above 0")
        return math.exp(draw.uniform(math.log(low), math.log(high)))
    if scale:
        raise RequestError(f"sample: {axis!r} is not understood; write (low, high) or (low, high, 'log')")
    if isinstance(low, int) and isinstance(high, int):
        return draw.randint(low, high)
    return draw.uniform(low, high)


def from_csv(path: str | Path) -> list[Point]:
    """One cell per row; the header names the parameters, values are unchanged text.

    Raises RequestError: unreadable, or a row of another length than the header.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = _values(csv.DictReader(file, strict=True))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {reason_of(error)}") from error
    ragged = next((n for n, row in enumerate(rows) if None in row or None in row.values()), None)
    if ragged is not None:
        raise RequestError(f"{path}: row {ragged + 1} has another number of columns than the header")
    return check_points(rows)


def axis_of(setting: str) -> tuple[str, list[str]]:
    """``lr=0.1,0.01`` -> its name and values, as unchanged text.

    ``seed=0..9`` counts; a JSON list (``text=["a,b", "c"]``) holds values with commas in them.

    Raises RequestError: none of these.
    """
    name, equals, text = setting.partition("=")
    if not equals:
        raise RequestError(f"--set {setting}: write NAME=VALUE,VALUE")
    if match := _RANGE.match(text):
        return name, _whole_numbers(match[1], match[2])
    if text.startswith("["):
        return name, _json_list(setting, text)
    return name, text.split(",")


def _whole_numbers(first: str, last: str) -> list[str]:
    if max(len(first), len(last)) > _DIGITS:
        raise RequestError(f"{first[:40]}..{last[:40]}: a number has at most {_DIGITS} digits")
    check_count(int(last) - int(first) + 1)
    return [str(number) for number in range(int(first), int(last) + 1)]


def _json_list(setting: str, text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        return text.split(",")
    if any(isinstance(value, list | dict) for value in values):
        raise RequestError(f"--set {setting}: a value is text, a number, true, false or null")
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def check_points(points: Sequence[Point]) -> list[Point]:
    """``points``, if there are any and their names are legal.

    Raises RequestError: no point, or an illegal or ambiguous name.
    """
    if isinstance(points, Mapping) or not all(isinstance(point, Mapping) for point in points):
        raise RequestError(
            f"points are a list of mappings from names to values, not {str(points)[:80]}",
            hint="hpcjobs.grid(lr=[0.1, 0.01]) makes one",
        )
    if not points:
        raise RequestError("a sweep of no cells: every axis needs a value")
    names = {name for point in points for name in point}
    for name in names:
        if not _NAME.match(name):
            raise RequestError(f"parameter {name!r}: use letters, digits, '_', '-', '.', and start with a letter")
    if len({variable(name) for name in names}) < len(names):
        raise RequestError(f"parameters {', '.join(sorted(names))}: two differ only in case or punctuation")
    return list(points)


@functools.cache
def variable(name: str) -> str:
    """The environment variable of a parameter: ``lr`` -> ``HPCJOBS_PARAM_LR``."""
    return "HPCJOBS_PARAM_" + re.sub(r"[^A-Z0-9_]", "_", name.upper())


Passing = Literal["flags", "env", "overrides"]
_TRAINER = "hpcjobs.trainers."
_ID_DIGITS = 12


class Cell(Frozen, frozen=True):
    """One run of the sweep: its id, and its parameters as text (None: the parameter is left out)."""

    id: str
    params: dict[str, str | None]
    arguments: str | None = None
    """Pickled keywords, for a Python function."""
    size: str = ""
    """Key of `Definition.sizes`: the job that the cell runs as; empty: the sweep's job."""


class Program(NamedTuple):
    """The program that every cell runs, and how it receives its parameters."""

    argv: tuple[str, ...]
    identity: str
    """Hash of the words, of the program's own file, and of the environment the user gave."""
    passing: Passing
    trainer: bool


def make_program(job: Job, *, env: dict[str, str], passing: Passing | None = None) -> Program:
    """The program of a resolved job. Python programs take flags unless ``passing`` says otherwise.

    Raises RequestError: it is a batch script, which is a job of its own.
    """
    if job.batch_script is not None:
        raise RequestError(
            "a batch script is a job of its own, and the cells of a sweep or study are tasks of one array",
            hint="give the program that each cell runs: sh -c 'COMMAND', or bash SCRIPT for a script",
        )
    python = job.argv[0] == job.python
    argv = job.argv[1:] if python else job.argv
    digest = hashlib.sha256(json.dumps([argv, env], sort_keys=True).encode())
    module, _ = split_module(job.argv) or (None, ())
    trainer = module is not None and module.startswith(_TRAINER)
    for file in _own_files(argv[1] if python else argv[0], Path(job.chdir), module=module):
        digest.update(file.read_bytes())
    if trainer:
        digest.update(__version__.encode())
    return Program(job.argv, digest.hexdigest(), passing or ("flags" if python else "env"), trainer)


def _own_files(program: str, folder: Path, *, module: str | None) -> Iterator[Path]:
    """The program's file, if it is in the folder where the job starts or is given by a path."""
    if module is not None:
        base = folder / module.replace(".", "/")
        files = [base.with_suffix(".py"), base / "__main__.py"]
    else:
        files = [folder / program]
    yield from (path for path in files if os.path.isfile(path))  # no error for a name that is too long


def make_cell(program: Program, point: Point) -> Cell:
    """The cell of a point: the same parameters of the same program have the same id, whatever their order."""
    params = {name: format_value(name, value) for name, value in point.items()}
    content = msgspec.json.encode([sorted(params.items()), program.identity])
    return Cell(id=hashlib.sha256(content).hexdigest()[:_ID_DIGITS], params=params)


def format_value(name: str, value: Any) -> str | None:
    """A parameter as the program will read it: text unchanged, ``true``, the shortest exact decimal.

    Raises RequestError: a value that no command line can hold.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _check_text(name, value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"parameter {name}: {value} is no number to pass on")
    if not isinstance(value, int | float):
        raise RequestError(f"parameter {name}: {value!r} is not text, a number, true, false or null")
    return str(value)


def _check_text(name: str, text: str) -> str:
    """Return ``text``; raise where no command line can hold it."""
    try:
        text.encode()
        if "\0" not in text:
            return text
    except UnicodeEncodeError:
        pass
    raise RequestError(f"parameter {name}: {text!r} holds a NUL byte or is not valid Unicode")


def command(program: Program, cell: Cell) -> tuple[str, ...]:
    """The cell's command: each ``{name}`` is replaced (``{{name}}`` is a literal one); a parameter without a place is
    appended as ``--name=value`` if the program takes flags."""
    placed: set[str] = set()

    def put(match: re.Match[str]) -> str:
        name = match["literal"] or match["name"]
        if name not in cell.params:
            return match[0]
        if match["literal"]:
            return f"{{{name}}}"
        placed.add(name)
        return cell.params[name] or ""

    args = [_PLACE.sub(put, arg) if "{" in arg else arg for arg in program.argv]
    if program.passing == "flags":
        for name, text in cell.params.items():
            if name not in placed and text is not None:
                args.append(_flag(name, text, trainer=program.trainer))
    elif program.passing == "overrides":
        left = [(name, text) for name, text in cell.params.items() if name not in placed and text is not None]
        args += [f"{name}={_quote_override(text)}" for name, text in left]
    return tuple(args)


_PLACE = re.compile(r"\{\{(?P<literal>[A-Za-z_][\w.-]*)\}\}|\{(?P<name>[A-Za-z_][\w.-]*)\}", re.ASCII)


def _quote_override(text: str) -> str:
    """A value as Hydra and OmegaConf read it: quoted, where its characters would mean something to them."""
    if _PLAIN_OVERRIDE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_PLAIN_OVERRIDE = re.compile(r"[\w.+/@%-]+", re.ASCII)


def _flag(name: str, text: str, *, trainer: bool) -> str:
    if not trainer:
        return f"--{name}={text}"
    dashed = name.replace("_", "-")
    return {"true": f"--{dashed}", "false": f"--no-{dashed}"}.get(text, f"--{dashed}={text}")


def shell_line(program: Program, cell: Cell) -> str:
    """One line of shell that gives the batch script the cell's variables and words."""
    variables = [f"HPCJOBS_CELL={cell.id}"]
    variables += [f"{variable(name)}={_quote_line(text)}" for name, text in cell.params.items() if text is not None]
    if cell.arguments is not None:
        variables.append(f"HPCJOBS_ARGUMENTS={cell.arguments}")
    return f"export {' '.join(variables)}; set -- {' '.join(map(_quote_line, command(program, cell)))}\n"


def _quote_line(text: str) -> str:
    """Quoted for the shell, without a line break."""
    return shlex.quote(text).replace("\n", "'$'\\n''")
