"""Turns the PROGRAM that a user typed into the tokens that a task runs."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcjobs.errors import RequestError
from hpcjobs.processes.modules import module_words

_TRAINERS = Path(__file__).resolve().parent.parent / "trainers"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z", re.ASCII)


def trainers() -> list[str]:
    """Names of the bundled trainers: the modules directly in ``hpcjobs/trainers``."""
    return sorted(path.stem for path in _TRAINERS.glob("*.py") if not path.stem.startswith("_"))


def program_words(program: str | Sequence[str]) -> tuple[str, ...]:
    """The words of ``program``; a text is split like a shell line: ``train.py --lr 1``.

    Raises:
        RequestError: a quotation that is not closed.
    """
    if not isinstance(program, str):
        return tuple(program)
    try:
        return tuple(shlex.split(program))
    except ValueError as error:
        raise RequestError(f"program {program!r}: {error}", hint="a list of words needs no quoting") from error


def program_argv(program: tuple[str, ...], *, python: str, chdir: Path) -> tuple[str, ...]:
    """What each task runs for ``program``.

    A dotted module runs as ``python -u -m``, a ``.py`` file as ``python -u FILE``, anything else as the executable it
    is. A bundled trainer's name and a module of hpcjobs run without the modules of the folder that they start in.

    Raises:
        RequestError: nothing to run, or the file is not there.
    """
    if not program:
        raise RequestError(
            "no program to run", hint="a trainer (" + ", ".join(trainers()) + "), a .py file or a command"
        )
    first, *args = program
    if first in trainers():
        return (python, "-u", *module_words(f"hpcjobs.trainers.{first}"), *args)
    if first.endswith(".py"):
        if not os.path.isfile(chdir / first):
            raise RequestError(f"program {first}: no such file in {chdir}")
        return (python, "-u", first, *args)
    if "/" in first:
        if not os.path.isfile(chdir / first):
            raise RequestError(f"program {first}: no such file in {chdir}")
        return (first, *args)
    if os.path.isfile(chdir / first):
        raise RequestError(
            f"program {first}: found in {chdir}, but the shell would not look there", hint=f"use ./{first}"
        )
    if _MODULE.match(first):
        return (python, "-u", *(module_words(first) if first.startswith("hpcjobs.") else ("-m", first)), *args)
    return (first, *args)


def split_module(argv: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The module that ``argv``, as of `program_argv`, runs, and its arguments; None: it runs no module."""
    for options in (("-u", "-m"), ("-u", *module_words("")[:-1])):
        if tuple(argv[1 : 1 + len(options)]) == options:
            name, *args = argv[1 + len(options) :]
            return name, tuple(args)
    return None


def misspelt_trainer(program: str) -> str | None:
    """The trainer that ``program`` may have been meant to name: a command that is not on PATH here.

    It is no error: the nodes may have a command of that name.
    """
    if "/" in program or "." in program or program in trainers() or shutil.which(program) is not None:
        return None
    return next(iter(difflib.get_close_matches(program, trainers(), n=1, cutoff=0.6)), None)


def default_name(program: tuple[str, ...]) -> str:
    """A job name from the program: ``./src/train.py`` -> ``train``, ``pkg.mod`` -> ``mod``."""
    first = program[0]
    is_file = "/" in first or first.endswith(".py")
    stem = Path(first).stem if is_file else first.rsplit(".", 1)[-1]
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")
    return cleaned[:100] or "job"  # part of file names
