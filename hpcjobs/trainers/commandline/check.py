"""A trainer's command line, read where the job is submitted: nothing of torch is loaded."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.commandline.flags import Parser, add_flags, parse_all


def check_arguments(trainer: str, argv: Sequence[str]) -> str:
    """Read ``argv`` as ``trainer`` will; the workload that they name.

    A workload of the user's own is not imported, so that arguments which may be its flags pass.

    Raises:
        UnknownFlagError: there is no such flag. UsageError: a value that a flag cannot have.
    """
    arguments = [arg for arg in argv if arg not in ("-h", "--help")]
    parser = _parser(trainer)
    parsed, unknown = parser.parse_known_args(arguments)
    workload: str = parsed.workload
    if unknown and ":" not in workload:
        parse_all(parser, arguments)
    return workload


def flag_names(trainer: str) -> list[str]:
    """Every flag of ``trainer``, as it is typed."""
    return [name for action in _parser(trainer)._actions for name in action.option_strings]


def flag_choices(trainer: str, name: str) -> list[str]:
    """The values that the flag ``name`` of ``trainer`` can have; empty: any, or no such flag."""
    actions = (action for action in _parser(trainer)._actions if name in action.option_strings)
    return [str(choice) for action in actions for choice in action.choices or ()]


@functools.cache
def _parser(trainer: str) -> argparse.ArgumentParser:
    parser = Parser(prog=trainer, allow_abbrev=False)
    add_flags(parser, Config, title="every trainer")
    add_flags(parser, own_flags(trainer), title=trainer)
    return parser


def own_flags(trainer: str) -> type[Any]:
    """The flags of ``trainer`` alone: the one dataclass that its module defines."""
    module = import_module(f"hpcjobs.trainers.{trainer}")
    values = vars(module).values()
    (flags,) = (value for value in values if is_dataclass(value) and value.__module__ == module.__name__)
    assert isinstance(flags, type)
    return flags
