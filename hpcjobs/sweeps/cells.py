"""Builds a cell from a program and a point: its identity, its command, its line of shell."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from hpcjobs import __version__
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.job.program import split_module
from hpcjobs.site.models import Frozen
from hpcjobs.sweeps.points import Point, variable

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
    """The program of a resolved job. Python programs take flags unless ``passing`` says otherwise."""
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

    Raises:
        RequestError: a value that no command line can hold.
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
