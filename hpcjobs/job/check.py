"""Checks whether a program can run, as far as that is known before it is queued."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcjobs.errors import RequestError
from hpcjobs.job.program import trainers
from hpcjobs.site.models import Site

_UNCHECKED = "--no-check submits it anyway"
_TRAINER_MODULE = "hpcjobs.trainers."


def check_program(program: Sequence[str], site: Site, *, python: str, chdir: Path, in_image: bool) -> None:
    """Check the flags of a bundled trainer; without an image on this machine also that command or module exists.

    Raises:
        RequestError: the program would fail at its start; what it would say.
    """
    first, *arguments = program
    if (trainer := first.removeprefix(_TRAINER_MODULE)) in trainers():
        check_trainer(trainer, arguments)
    elif site.scheduler == "local" and not (in_image or site.modules or site.setup or "PATH" in site.env):
        _check_existence(first, python=python, chdir=chdir)


def check_trainer(trainer: str, arguments: Sequence[str]) -> None:
    """Raise what ``trainer`` would say to ``arguments``.

    Raises:
        RequestError: it would refuse them.
    """
    from hpcjobs.runtime.exits import UsageError
    from hpcjobs.trainers.commandline.check import check_arguments
    from hpcjobs.trainers.commandline.flags import UnknownFlagError
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
    trainer = program[0].removeprefix(_TRAINER_MODULE) if program else ""
    if trainer not in trainers() or not {"-h", "--help"} & set(program[1:]):
        return False
    from hpcjobs.trainers import run

    run(trainer, program[1:])
    return True


def _is_option_of_submit(argument: str) -> bool:
    """Whether ``argument``, which no trainer has, is ``--nodes``, ``--nodes=2``, ``-N`` or ``-N2``."""
    from hpcjobs.site.sbatch import BY_LETTER

    letter = argument[1] if re.match(r"-\w", argument) else ""
    return argument.partition("=")[0] in options_of_submit() or letter in {*BY_LETTER, *"sf"}


def options_of_submit() -> frozenset[str]:
    """The long options of ``hpcjobs submit``, without those that it passes to sbatch unread."""
    from hpcjobs.job.models import JobSpec
    from hpcjobs.site.models import Resources

    fields = {*JobSpec.__struct_fields__[2:], *Resources.__struct_fields__}
    return frozenset({f"--{field.replace('_', '-')}" for field in fields} | _OF_THE_COMMAND)


_OF_THE_COMMAND = frozenset(
    (
        *("--site", "--spec", "--after", "--after-any", "--after-fail", "--dry-run", "--test-only", "--explain"),
        *("--parsable", "--wait", "--follow", "--json", "--job-name", "--no-requeue"),
    )
)


def _check_existence(first: str, *, python: str, chdir: Path) -> None:
    """A command of this machine, or a module of the Python that runs hpcjobs; files have been looked for before."""
    if "/" in first or first.endswith(".py"):
        return
    is_module = "." in first and not os.path.isfile(chdir / first)
    if not is_module and shutil.which(first) is None:
        raise RequestError(f"program {first}: no such command on this machine", hint=_UNCHECKED)
    package = first.partition(".")[0]
    if is_module and python == sys.executable and not _is_importable(package, chdir) and shutil.which(first) is None:
        raise RequestError(f"program {first}: no module {package!r} here, and no such command", hint=_UNCHECKED)


def _is_importable(package: str, chdir: Path) -> bool:
    folders = [chdir, *(Path(text) for text in os.environ.get("PYTHONPATH", "").split(os.pathsep) if text)]
    if any((folder / package).is_dir() or (folder / f"{package}.py").is_file() for folder in folders):
        return True
    return importlib.util.find_spec(package) is not None
