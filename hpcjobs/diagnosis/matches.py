"""Finds the rules that explain lines of a log, and chooses the explanation that is the cause."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcjobs.diagnosis.log import TRACEBACK
from hpcjobs.diagnosis.rules import RULES, may_explain
from hpcjobs.diagnosis.rules.rule import Rule
from hpcjobs.diagnosis.values import Kind, LogLine

_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_EXCEPTION = Rule(
    "python-error",
    re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$"),
    "The program ended with {error}: {message}",
    kind=Kind.ERROR,
)
"""Any exception at the end of a traceback, whatever its name."""
_MESSAGE_LINES = 6
"""So many lines below an exception may still be of its message."""
_COMMAND = re.compile(r"\++ ")
"""What `set -x` prints: a command, not what it did."""
_OUTSIDE = re.compile(r"(?:slurmstepd|srun|kernel|hpcjobs)\b|.*NVRM")
"""Reports of Slurm and the system about the program, which it cannot quote."""
_JOB_ENDED = re.compile(r"\*\*\* JOB \d+ ")
_LIBRARY = re.compile(r".*NCCL WARN |\[[EF][ \d]|.*UCX +ERROR|\[[\w.-]+:\d+\]|.*gloo/")
"""Reports of a library about what its caller then raises."""
_OF_RANKS = re.compile(r"(?i)nccl|gloo|c10d|\bucx|\bmpi|distributed|socket|\bstore|process group|connect")
"""What an exception about the talk between ranks names."""
_TOOL = re.compile(r"[\w./+-]+: (?:[^'\"]|'[^']*'|\"[^\"]*\")*: ")
"""What a tool says before the reason: ``cp: error writing 'x': ``."""
_QUOTES, _BRACKETS = re.compile(r"(?<!\w)[\"'`]|[\"'`](?!\w)"), re.compile(r"\[[^]]*\]|\([^)]*\)")
_WARNING = re.compile(r"\bWarning: |\bWARN(?:ING)?\b|^\[W\b")
_PLAIN, _FEW = re.compile(r"(?<!\S)[A-Za-z][a-z]+(?=\s)"), 2
"""Plain English: a line that begins with so much of it speaks about an error; it does not report one."""
_LAST_LINES = 40
"""What prints more lines behind an error than this may have survived it."""
RECENT_LINES = 500
"""So far before the last line that a rule explains is another one looked for."""
_RANKS = 16
"""The last exceptions of so many ranks are compared with lines of none."""
_WAITS = {"collective-timeout", "rendezvous-timeout"}
"""Causes that ranks report because another one does not come: why it failed says more."""


class Match(NamedTuple):
    """A line that a rule explains, and the values of the rule's groups."""

    rule: Rule
    line: LogLine
    values: dict[str, str]
    traceback: int | None = None
    """The number of the traceback that it ends, with all that are chained to it; None: it stands by itself."""
    is_quoted: bool = False
    """The text stands within other words: who printed it may speak of another error, or of one that was handled."""
    is_doubtful: bool = False
    """Something else in the log speaks against it."""

    @property
    def raised(self) -> bool:
        """Whether an exception says it that nobody handled, and that does not come from another rank's end."""
        return self.traceback is not None and self.rule.kind is not Kind.CONSEQUENCE


def find_matches(lines: Iterable[LogLine], rules: Sequence[Rule] = RULES) -> Iterator[Match]:
    """Each line that a rule explains, with the first such rule, in the order of the lines."""
    tracebacks = _Tracebacks()
    for line in lines:
        traceback, ends = tracebacks.place(line)
        if traceback is not None and not ends:
            continue  # the program's own text, which may quote anything
        if _COMMAND.match(line.text):
            continue
        match = _first_match(line, rules)
        if match is None and ends and (exception := _EXCEPTION.pattern.match(line.text)):
            match = Match(_EXCEPTION, line, _values(exception))
        if match is not None:
            yield match._replace(traceback=traceback)


class _Tracebacks:
    """Numbers the tracebacks of each rank; chained ones have one number."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[int | None, int] = {}
        self._ended: dict[int | None, tuple[int, int]] = {}
        """The last one of each rank, and how many lines of its message may come."""
        self._chained: dict[int | None, int] = {}

    def place(self, line: LogLine) -> tuple[int | None, bool]:
        """The traceback that a line belongs to, and whether it is its end: the exception, or more of its message."""
        rank, text = line.rank, line.text
        if TRACEBACK in text:
            self._count += 1
            self._open[rank] = self._chained.pop(rank, self._count)
            self._ended.pop(rank, None)
            return self._open[rank], False
        if rank in self._open:
            if not text.strip() or text.startswith((" ", "\t")):
                return self._open[rank], False
            self._ended[rank] = (self._open.pop(rank), _MESSAGE_LINES)
            return self._ended[rank][0], True
        if rank not in self._ended:
            return None, False
        number, left = self._ended[rank]
        if _CHAINED.search(text):
            self._chained[rank] = number
        if not left or _OUTSIDE.match(text):
            del self._ended[rank]
            return None, False
        self._ended[rank] = (number, left - 1)
        return number, True


def choose_match(matches: Iterable[Match], first_rank: int | None, lines: Sequence[LogLine] = ()) -> Match | None:
    """The match that shows the cause: of the rank that failed first before others, causes before consequences.

    An exception that nobody handled counts more than what was printed before it. Of equal ones the first in the log
    counts: what comes later is often the same error, wrapped.
    """

    def importance(match: Match) -> tuple[bool, bool, int]:
        other = match.line.rank not in (None, first_rank) if first_rank is not None else False
        return match.rule.kind is Kind.CONSEQUENCE, other, match.rule.kind.value

    recent = _without_explained(_without_refuted(_last_of_each_rank(list(matches))))
    best = min(recent, key=importance, default=None)
    if best is None or best.raised or _OUTSIDE.match(best.line.text):
        return best
    if any(_confirms(match, best) for match in recent):
        return best._replace(is_quoted=False)
    others = {match.rule.cause for match in recent if match.rule.kind is Kind.CAUSE and not match.is_quoted}
    doubtful = best.is_doubtful or bool(others - {best.rule.cause}) or _count_after(best, lines) > _LAST_LINES
    return best._replace(is_doubtful=doubtful)


def _confirms(later: Match, match: Match) -> bool:
    """Whether the same rank ended with an exception of the same cause: it did not survive what it reported before."""
    return later.raised and (later.rule.cause, later.line.rank) == (match.rule.cause, match.line.rank)


def _count_after(match: Match, lines: Sequence[LogLine]) -> int:
    """How much its rank, the program where ranks are not told apart, printed behind it."""
    after = itertools.dropwhile(lambda line: line is not match.line, lines)
    return sum(line.rank == match.line.rank and not _OUTSIDE.match(line.text) for line in after)


def _without_refuted(matches: list[Match]) -> list[Match]:
    """Without what a later exception of the same rank, or of any for lines of none, shows to be no cause."""
    finals = {match.line.rank: n for n, match in enumerate(matches) if match.raised}
    some = list(finals.values())[:_RANKS]
    program_failed = any(_is_of_program(match) for match in matches)
    doubtful: set[int] = set()
    left: list[int] = []
    for index, match in enumerate(matches):
        own = some if match.line.rank is None else [finals[match.line.rank]] if match.line.rank in finals else []
        later = [n for n in own if n > index and matches[n].traceback != match.traceback]
        refuting = [n for n in later if _refutes(matches[n], match)]
        if refuting:
            doubtful |= set(refuting) if match.rule.kind is Kind.CAUSE and not match.is_quoted else set()
        elif match.rule.cause not in _WAITS or not program_failed:
            left.append(index)
            doubtful |= {index} if any(_contradicts(matches[n], match) for n in later) else set()
    return [matches[n]._replace(is_doubtful=n in doubtful) for n in left]


def _refutes(later: Match, match: Match) -> bool:
    """Whether the program went on after what ``match`` reports, until it failed of something else."""
    if match.raised:
        return match.line.rank is not None  # of several ranks whose lines look alike each may have raised one
    if _OUTSIDE.match(match.line.text):
        return _JOB_ENDED.search(match.line.text) is not None  # an attempt before this one
    if later.rule.cause in match.rule.more_precise_than:
        return False
    return not (_LIBRARY.match(match.line.text) and _OF_RANKS.search(later.line.text))


def _contradicts(later: Match, match: Match) -> bool:
    """Whether ``later`` may be the cause as well."""
    if _OUTSIDE.match(match.line.text) or later.rule.cause == match.rule.cause:
        return False
    return match.rule.kind is Kind.CAUSE and (_is_of_program(later) or later.rule.cause in match.rule.more_precise_than)


def _is_of_program(match: Match) -> bool:
    """Whether it is an exception about anything but the talk between ranks."""
    return match.raised and match.rule.cause not in _WAITS and not _OF_RANKS.search(match.line.text)


def _without_explained(matches: list[Match]) -> list[Match]:
    """Without the causes for which the same rank, or Slurm, reports a more precise one."""
    explained = {(match.line.rank, cause) for match in matches for cause in match.rule.more_precise_than}
    return [m for m in matches if not {(m.line.rank, m.rule.cause), (None, m.rule.cause)} & explained]


def _last_of_each_rank(matches: list[Match]) -> list[Match]:
    """Those near the end of what their rank printed: a program may survive what it reported long before."""
    last = {match.line.rank: match.line.number for match in matches}
    return [match for match in matches if match.line.number > last[match.line.rank] - RECENT_LINES]


def _first_match(line: LogLine, rules: Sequence[Rule]) -> Match | None:
    if not may_explain(line.text):
        return None
    for rule in rules:
        if match := rule.pattern.search(line.text):
            return Match(rule, line, _values(match), is_quoted=_is_quoted(line.text, match.start()))
    return None


def _is_quoted(text: str, start: int) -> bool:
    """Whether what is found at ``start`` stands within quotation marks, a sentence or a warning."""
    before = text[:start]
    if _OUTSIDE.match(text) or _TOOL.fullmatch(before):
        return False
    if _WARNING.search(before) and not _LIBRARY.match(text):
        return True
    return len(_QUOTES.findall(before)) % 2 == 1 or len(_PLAIN.findall(_BRACKETS.sub("", before))) > _FEW


def _values(match: re.Match[str]) -> dict[str, str]:
    """Values by group name; ``file``, ``file2`` and so on are alternatives of one name."""
    values: dict[str, str] = {}
    for name, value in match.groupdict().items():
        if value is not None:
            values.setdefault(name.rstrip("0123456789"), value)
    return values
