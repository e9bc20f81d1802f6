"""From the PROGRAM a user typed to the tokens a task runs."""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path

from hpcjobs.errors import RequestError, nearest

_TRAINERS = Path(__file__).resolve().parent.parent / "trainers"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z", re.ASCII)


def trainers() -> list[str]:
    """Names of the bundled trainers: the modules directly in ``hpcjobs/trainers``."""
    return sorted(path.stem for path in _TRAINERS.glob("*.py") if not path.stem.startswith("_"))


def program_argv(program: tuple[str, ...], *, python: str, chdir: Path) -> tuple[str, ...]:
    """What each task runs for ``program``.

    A bundled trainer's name and a dotted module run as ``python -u -m``, a ``.py`` file as
    ``python -u FILE``, anything else as the executable it is.

    Raises:
        RequestError: nothing to run, or the file is not there.
    """
    if not program:
        raise RequestError(
            "no program to run", hint="a trainer (" + ", ".join(trainers()) + "), a .py file or a command"
        )
    first, *args = program
    if first in trainers():
        return (python, "-u", "-m", f"hpcjobs.trainers.{first}", *args)
    if first.endswith(".py"):
        if not (chdir / first).is_file():
            raise RequestError(f"program {first}: no such file in {chdir}")
        return (python, "-u", first, *args)
    if "/" in first:
        if not (chdir / first).is_file():
            raise RequestError(f"program {first}: no such file in {chdir}")
        return (first, *args)
    if (chdir / first).is_file():
        raise RequestError(
            f"program {first}: found in {chdir}, but the shell would not look there", hint=f"say ./{first}"
        )
    if _MODULE.match(first):
        return (python, "-u", "-m", first, *args)
    _refuse_misspelt_trainer(first)
    return (first, *args)


def _refuse_misspelt_trainer(first: str) -> None:
    """A command that is not on PATH here may be on the node's; one letter off a trainer it hardly is."""
    if shutil.which(first) is None and difflib.get_close_matches(first, trainers(), n=1, cutoff=0.6):
        raise RequestError(
            f"program {first!r}: no such trainer, and no such command here", hint=nearest(first, trainers())
        )


def default_name(program: tuple[str, ...]) -> str:
    """A job name from the program: ``./src/train.py`` -> ``train``, ``pkg.mod`` -> ``mod``."""
    first = program[0]
    is_file = "/" in first or first.endswith(".py")
    stem = Path(first).stem if is_file else first.rsplit(".", 1)[-1]
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")
    return cleaned or "job"
