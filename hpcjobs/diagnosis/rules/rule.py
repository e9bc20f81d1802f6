"""The type of a rule about a line of a log."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from hpcjobs.diagnosis.values import Kind

_PARSER: Final[Any] = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
"""The parser of `re`: it has no public name, and no other one knows its syntax completely."""


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


def find_required_texts(pattern: re.Pattern[str]) -> frozenset[str]:
    """Texts in small letters, of which every match of ``pattern`` contains at least one.

    Raises:
        ValueError: the pattern requires no text, so that it had to be tried on every line.
    """
    required = _require(_PARSER.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
    if not required:
        raise ValueError(f"{pattern.pattern} has an alternative without a text of its own")
    return required


def _require(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The best of the sets that a sequence requires: that with the longest shortest text. Empty: it requires none."""
    sets, literal = [frozenset[str]()], ""
    for operation, argument in parsed:
        name = str(operation)
        if name == "LITERAL":
            literal += chr(argument).lower()
            continue
        if literal:
            sets.append(frozenset({literal}))
        literal = ""
        if name == "SUBPATTERN":
            sets.append(_require(argument[-1]))
        elif name == "BRANCH":
            branches = [_require(branch) for branch in argument[1]]
            sets.append(frozenset().union(*branches) if all(branches) else frozenset())
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0:
            sets.append(_require(argument[2]))
    if literal:
        sets.append(frozenset({literal}))
    return max(sets, key=lambda texts: min(map(len, texts), default=0))
