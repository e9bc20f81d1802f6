"""The type of a rule about a line of a log."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcjobs.diagnosis.values import Kind
from hpcjobs.gpu_errors import GpuError


class Rule(NamedTuple):
    """A pattern of one line of a log, the cause it shows, and what to do about it.

    ``text`` and ``fix`` are filled in with the pattern's named groups, and ``fix`` with what `fixes` knows of the job.
    """

    cause: str
    pattern: re.Pattern[str]
    text: str
    fix: tuple[str, ...] = ()
    kind: Kind = Kind.CAUSE
    certain: bool = True
    more_precise_than: tuple[str, ...] = ()
    """Causes that this one explains: the same rank reports them too, on its way to this error."""


def rule(
    cause: str,
    pattern: str,
    text: str,
    *fix: str,
    kind: Kind = Kind.CAUSE,
    certain: bool = True,
    more_precise_than: tuple[str, ...] = (),
) -> Rule:
    """A rule whose pattern is given as text; small and capital letters differ."""
    return Rule(cause, re.compile(pattern), text, fix, kind, certain, more_precise_than)


def gpu_rule(error: GpuError, *fix: str) -> Rule:
    """The rule about an error that trainers and the node side know as well."""
    return rule(error.cause, error.pattern, error.text, *(fix or (error.fix,)))
