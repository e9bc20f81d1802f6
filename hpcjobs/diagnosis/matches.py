"""Which rules explain which lines of a log, and which of these explanations is the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcjobs.diagnosis.rules import RULES, may_explain
from hpcjobs.diagnosis.rules.rule import Rule
from hpcjobs.diagnosis.values import Kind, Line

_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = Rule(
    "python-error",
    re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$"),
    "The program ended with {error}: {message}",
    kind=Kind.ERROR,
)
"""Any exception at the end of a traceback, whatever its name."""
RECENT_LINES = 500
"""So far before the last line that a rule explains is another one looked for."""


class Match(NamedTuple):
    """A line that a rule explains, and the values of the rule's groups."""

    rule: Rule
    line: Line
    values: dict[str, str]


def find_matches(lines: Iterable[Line], rules: Sequence[Rule] = RULES) -> Iterator[Match]:
    """Each line that a rule explains, with the first such rule, in the order of the lines."""
    in_traceback: set[int | None] = set()
    for line in lines:
        if _TRACEBACK in line.text:
            in_traceback.add(line.rank)
            continue
        if line.rank in in_traceback and line.text.startswith((" ", "\t")):
            continue  # the program's own text, which may quote anything
        ends_traceback = line.rank in in_traceback and bool(line.text.strip())
        in_traceback -= {line.rank} if ends_traceback else set()
        match = _first_match(line, rules)
        if match is None and ends_traceback and (exception := _EXCEPTION.pattern.match(line.text)):
            match = Match(_EXCEPTION, line, _values(exception))
        if match is not None:
            yield match


def choose_match(matches: Iterable[Match], first_rank: int | None) -> Match | None:
    """The match that shows the cause: of the rank that failed first before others, causes before consequences.

    Of equal ones the first in the log counts: what comes later is often the same error, wrapped.
    """

    def importance(match: Match) -> tuple[bool, bool, int]:
        other = match.line.rank not in (None, first_rank) if first_rank is not None else False
        return match.rule.kind is Kind.CONSEQUENCE, other, match.rule.kind.value

    recent = _without_explained(_last_of_each_rank(list(matches)))
    return min(recent, key=importance, default=None)


def _without_explained(matches: list[Match]) -> list[Match]:
    """Without the causes for which the same rank, or Slurm, reports a more precise one."""
    explained = {(match.line.rank, cause) for match in matches for cause in match.rule.more_precise_than}
    return [m for m in matches if not {(m.line.rank, m.rule.cause), (None, m.rule.cause)} & explained]


def _last_of_each_rank(matches: list[Match]) -> list[Match]:
    """Those near the end of what their rank printed: a program may survive what it reported long before."""
    last = {match.line.rank: match.line.number for match in matches}
    return [match for match in matches if match.line.number > last[match.line.rank] - RECENT_LINES]


def _first_match(line: Line, rules: Sequence[Rule]) -> Match | None:
    if not may_explain(line.text):
        return None
    for rule in rules:
        if match := rule.pattern.search(line.text):
            return Match(rule, line, _values(match))
    return None


def _values(match: re.Match[str]) -> dict[str, str]:
    """Values by group name; ``file``, ``file2`` and so on are alternatives of one name."""
    values: dict[str, str] = {}
    for name, value in match.groupdict().items():
        if value is not None:
            values.setdefault(name.rstrip("0123456789"), value)
    return values
