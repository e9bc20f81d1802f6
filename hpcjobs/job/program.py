"""Turns the PROGRAM that a user typed into the tokens that a task runs."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcjobs import trainers
from hpcjobs.errors import RequestError
from hpcjobs.files import path_word
from hpcjobs.processes.start import module_words
from hpcjobs.site.library import PROJECT_FILE, project_jobs
from hpcjobs.site.models import Site
from hpcjobs.site.resources import BY_LETTER, FIELDS, OPTIONS, Treatment

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z", re.ASCII)


def program_words(program: str | Sequence[str]) -> tuple[str, ...]:
    """The words of ``program``; a text is split like a shell line: ``train.py --lr 1``.

    Raises RequestError: a quotation that is not closed, or a text that only a shell can run.
    """
    if not isinstance(program, str):
        return tuple(program)
    try:
        arguments = tuple(shlex.split(program))
    except ValueError as error:
        raise RequestError(f"program {program!r}: {error}", hint="a list of words needs no quoting") from error
    if operators := _find_operators(program):
        raise RequestError(
            f"program {program!r}: no shell reads it, the program would get {operators[0]!r} as an argument",
            hint=f"bash -c {shlex.quote(program)}",
        )
    return arguments


def _find_operators(text: str) -> list[str]:
    """Words without quotes that mean something to a shell alone: ``&&``, ``cd;``."""
    parts: list[str] = []
    with suppress(ValueError):  # an escaped quotation mark
        parts = shlex.split(text, posix=False)  # keeps the quotes
    return [part for part in parts if part in _OPERATORS or (part.endswith(";") and not part.endswith("\\;"))]


_OPERATORS = frozenset(("&&", "||", "|", "&", ">", ">>", "<", "2>", "2>>", "2>&1", "&>", ">&"))


def program_argv(program: tuple[str, ...], *, python: str, chdir: Path) -> tuple[str, ...]:
    """Return the command of each task for ``program``.

    A dotted module runs as ``python -u -m``, a ``.py`` file as ``python -u FILE``, other programs directly. A
    bundled trainer's name and a module of hpcjobs run without the modules of the folder that they start in.

    Raises RequestError: no program, or its file is missing or not executable.
    """
    if not program:
        raise RequestError(
            "no program to run",
            hint=f"a trainer ({', '.join(trainers.NAMES)}), a .py file or a command; `hpcjobs init PROGRAM` writes "
            "hpcjobs.yaml, whose job submit runs without PROGRAM",
        )
    first, *args = program
    if first in trainers.NAMES:
        return (python, "-u", *module_words(f"hpcjobs.trainers.{first}"), *args)
    if first.endswith(".py"):
        if not os.path.isfile(chdir / first):
            raise RequestError(f"program {first}: no such file in {chdir}", hint=_similar(first, chdir))
        return (python, "-u", first, *args)
    if "/" in first:
        if not os.path.isfile(chdir / first):
            raise RequestError(f"program {first}: no such file in {chdir}", hint=_similar(first, chdir))
        if not os.access(chdir / first, os.X_OK):
            raise RequestError(f"program {first}: the file is not executable", hint=_ways_to_run(first, chdir))
        return (first, *args)
    if os.path.isfile(chdir / first):
        raise RequestError(
            f"program {first}: found in {chdir}, but the shell would not look there", hint=_ways_to_run(first, chdir)
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


def _ways_to_run(first: str, chdir: Path) -> str:
    """How to run a file that the shell would not start by the word ``first``."""
    path = path_word(first if "/" in first else f"./{first}")
    if os.access(chdir / first, os.X_OK):
        return f"use {path}"
    return f"`bash {path_word(first)}` for a script of shell; or `chmod +x {path}`, then {path}"


def misspelt_name(program: str) -> str | None:
    """What ``program`` may have been meant to name, a trainer or a job: a command that is not on PATH here.

    Callers only warn: the nodes may have a command of that name.
    """
    jobs = project_jobs(Path.cwd())
    if "/" in program or "." in program or program in (*trainers.NAMES, *jobs) or shutil.which(program) is not None:
        return None
    if near := _near(program, jobs):
        return f"the job of {PROJECT_FILE} is {near!r}"
    trainer = next(iter(difflib.get_close_matches(program, trainers.NAMES, n=1, cutoff=0.6)), None)
    return None if trainer is None else f"the trainer is {trainer!r}"


def _near(name: str, known: Sequence[str]) -> str | None:
    """The name of ``known`` that is most like ``name``, or begins with it."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return next(iter([*close, *(other for other in known if other.startswith(name))]), None)


def default_name(program: tuple[str, ...]) -> str:
    """A job name from the program: ``./src/train.py`` -> ``train``, ``pkg.mod`` -> ``mod``."""
    first = program[0]
    is_file = "/" in first or first.endswith(".py")
    stem = Path(first).stem if is_file else first.rsplit(".", 1)[-1]
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")
    return cleaned[:100] or "job"  # part of file names


_UNCHECKED = "--no-check submits it anyway"
TRAINER_MODULE = "hpcjobs.trainers."


def check_program(program: Sequence[str], site: Site, *, python: str, chdir: Path, in_image: bool) -> None:
    """Check the flags of a bundled trainer; without an image on this machine also that command or module exists.

    Raises RequestError: the program would fail at its start; has its message.
    """
    first, *arguments = program
    if (trainer := first.removeprefix(TRAINER_MODULE)) in trainers.NAMES:
        check_trainer(trainer, arguments)
    elif not site.kind.has_nodes and not (in_image or site.modules or site.setup or "PATH" in site.env):
        _check_existence(first, python=python, chdir=chdir)


def check_trainer(trainer: str, arguments: Sequence[str]) -> None:
    """Raise the error that ``trainer`` would raise for ``arguments``. Raises RequestError: it would refuse them."""
    from hpcjobs.runtime.exits import UsageError
    from hpcjobs.trainers.config import UnknownFlagError, check_arguments
    from hpcjobs.trainers.workloads import check_workload_name

    try:
        check_workload_name(check_arguments(trainer, arguments))
    except UnknownFlagError as error:
        if _is_option_of_submit(error.argument):
            hint = f"options of hpcjobs come before the program: hpcjobs submit [OPTIONS] {trainer} [ARGS]..."
            raise RequestError(f"{error.message}: it is an option of hpcjobs", hint=hint) from error
        raise RequestError(error.message, hint=f"{error.hint}; {_UNCHECKED}") from error
    except UsageError as error:
        raise RequestError(error.message, hint=f"{error.hint}; {_UNCHECKED}") from error


def print_trainer_help(program: Sequence[str]) -> bool:
    """Print the flags of a bundled trainer if ``program`` asks for them (``ddp --help``); whether it does."""
    trainer = program[0].removeprefix(TRAINER_MODULE) if program else ""
    if trainer not in trainers.NAMES or not {"-h", "--help"} & set(program[1:]):
        return False
    trainers.run(trainer, program[1:])
    return True


def _is_option_of_submit(argument: str) -> bool:
    """Whether ``argument``, which no trainer has, is ``--nodes``, ``--nodes=2``, ``-N`` or ``-N2``."""
    letter = argument[1] if re.match(r"-\w", argument) else ""
    return argument.partition("=")[0] in options_of_submit() or letter in {*BY_LETTER, *"sf"}


def options_of_submit() -> frozenset[str]:
    """Return the long options of ``hpcjobs submit``, without options passed to sbatch unread."""
    from hpcjobs.job.models import JobSpec

    fields = {*JobSpec.__struct_fields__[2:], *FIELDS}
    of_sbatch = {f"--{name}" for name, option in OPTIONS.items() if option.treatment is Treatment.COMMAND}
    return frozenset({f"--{field.replace('_', '-')}" for field in fields} | of_sbatch | _OF_THE_COMMAND)


_OF_THE_COMMAND = frozenset(
    (
        *("--site", "--spec", "--after", "--after-any", "--after-fail", "--dry-run", "--explain", "--follow", "--json"),
        *("--budget", "--min-efficiency", "--finish-by"),
    )
)


def _check_existence(first: str, *, python: str, chdir: Path) -> None:
    """A command of this machine, or a module of the Python that runs hpcjobs; files have been looked for before."""
    if "/" in first or first.endswith(".py"):
        return
    is_module = _MODULE.match(first) is not None
    similar = _similar(first, chdir)
    hint = f"{similar} {_UNCHECKED}" if similar else _UNCHECKED
    if not is_module and shutil.which(first) is None:
        raise RequestError(f"program {first}: no such command on this machine", hint=hint)
    package = first.partition(".")[0]
    if is_module and os.path.isfile(chdir / f"{package}.py") and not os.path.isdir(chdir / package):
        raise RequestError(f"program {first}: {package}.py is a file, and no package with modules", hint=hint)
    if is_module and python == sys.executable and not is_importable(package, chdir) and shutil.which(first) is None:
        raise RequestError(
            f"program {first}: no such file in {chdir}, no module {package!r} here, and no such command", hint=hint
        )


def _similar(first: str, chdir: Path) -> str | None:
    """The file of the folder, the job of its project file or the trainer that was probably meant."""
    folder, name = os.path.split(first)
    try:
        files = [file for file in os.listdir(chdir / folder) if os.path.isfile(chdir / folder / file)]
    except OSError:
        files = []
    known = {os.path.splitext(file)[0]: file for file in files} | {file: file for file in files}
    if not folder:
        known |= {other: other for other in (*trainers.NAMES, *project_jobs(chdir))}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    jobs = [] if folder else project_jobs(chdir)
    if not close and jobs:
        near = _near(name, jobs)
        return f"did you mean {near}?" if near else f"jobs of {PROJECT_FILE}: {', '.join(jobs)}."
    return f"did you mean {os.path.join(folder, known[close[0]])}?" if close else None


def is_importable(package: str, chdir: Path) -> bool:
    """Whether a program in the folder ``chdir`` that this Python runs can import ``package``."""
    folders = [chdir, *(Path(text) for text in os.environ.get("PYTHONPATH", "").split(os.pathsep) if text)]
    if any((folder / package).is_dir() or (folder / f"{package}.py").is_file() for folder in folders):
        return True
    return importlib.util.find_spec(package) is not None
