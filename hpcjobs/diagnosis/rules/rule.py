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


PROGRAM_ERROR = "program-error"
"""The cause for an error message of the program itself, for example of the bundled trainers."""


class Rule(NamedTuple):
    """A pattern of one line of a log, its cause, and the fixes.

    Named groups of the pattern fill placeholders of ``text`` and ``fix``; values of the job fill ``fix``.
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
    """Make a rule from the text of a pattern; small and capital letters differ."""
    return Rule(cause, re.compile(pattern), text, fix, kind, certain, more_precise_than)


def find_required_texts(pattern: re.Pattern[str]) -> frozenset[str]:
    """Find texts in small letters: every match of ``pattern`` contains at least one of them.

    Raises:
        ValueError: the pattern requires no text, so that it had to be tried on every line.
    """
    required = _require(_PARSER.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
    if not required:
        raise ValueError(f"{pattern.pattern} has an alternative without a text of its own")
    return required


def _require(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The set of texts that a sequence requires, with the longest shortest text; empty if it requires no text."""
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
