"""Finds the rules that explain lines of a log, and chooses the explanation that is the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from hpcjobs.diagnosis.log import TRACEBACK, signal_reported_by_shell
from hpcjobs.diagnosis.rules import LAST_WORDS, RULES, may_explain
from hpcjobs.diagnosis.rules.system import Rule
from hpcjobs.diagnosis.values import Kind, LogLine

_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_EXCEPTION = Rule(
    "python-error",
    re.compile(r"(?!(?:[\w.]+\.)?(?:Base)?ExceptionGroup\b)(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$"),
    "The program ended with {error}: {message}",
    kind=Kind.ERROR,
)
"""Any exception at the end of a traceback, except a group: its members are more precise."""
_MESSAGE_LINES = 6
"""Lines below an exception that may belong to its message."""
_IGNORED = re.compile(
    r"Exception ignored (?:in|on|while)\b|--- Logging error ---|Error in (?:atexit\.|sys\.excepthook)"
)
"""Text that Python prints before an exception that it ignores."""
_ELSEWHERE = re.compile(
    r"Exception in (?:thread (?!\"main\")|callback |default exception handler)"
    r"|Process \S*Process\S*:$|Process \S*Worker\S*:$"
    r"|(?:Task|Future) exception was never retrieved|exception calling callback"
)
"""Text that Python prints before an exception that ends a thread, a task or a child process, but not the program."""
_INTRODUCTION_LINES = 3
"""Lines from such an introduction to its traceback, at most."""
_COMMAND = re.compile(r"\++ ")
"""A command that `set -x` prints, not its output."""
_OUTSIDE = re.compile(r"(?:slurmstepd|srun|kernel|hpcjobs)\b|.*NVRM")
"""Reports of Slurm and the system about the program, which it cannot quote."""
_JOB_ENDED = re.compile(r"\*\*\* JOB \d+ ")
_OF_CHILD = re.compile(r"CalledProcessError|non-zero exit status|ProcessRaisedException|ProcessExitedException")
"""Exceptions about a child process; the error of the process is in the lines before."""
_LIBRARY = re.compile(r".*NCCL WARN |\[[EF][ \d]|.*UCX +ERROR|\[[\w.-]+:\d+\]|.*gloo/")
"""Reports of a library; its caller then raises an exception about the same error."""
_OF_RANKS = re.compile(
    r"(?i)nccl|gloo|c10d|\bucx|\bmpi|dist(?:ributed|backend|network|store)|socket|\bstore|process group|connect"
)
"""Names in exceptions about the communication between ranks."""
_TOOL = re.compile(r"[\w./+-]+: (?:[^'\"]|'[^']*'|\"[^\"]*\")*: ")
"""The words of a tool before the reason: ``cp: error writing 'x': ``."""
_QUOTES, _BRACKETS = re.compile(r"(?<!\w)[\"'`]|[\"'`](?!\w)"), re.compile(r"\[[^]]*\]|\([^)]*\)")
_WARNING = re.compile(r"\bWarning: |\bWARN(?:ING)?\b|^\[W\b")
_PLAIN, _FEW = re.compile(r"(?<!\S)[A-Za-z][a-z]+(?=\s)"), 2
"""Most plain words before an error name; a longer line describes an error and does not report one."""
_FEW_LINES, _MANY_LINES = 2, 10
"""Lines of ordinary output after an error that make it doubtful, and lines that show that the program survived it."""
_AFTERWARDS = re.compile(r"wandb: |[\[=*-]|[IWEF]\d{3,4} |(?:real|user|sys)\s|Command exited|\s*$")
"""Lines of trackers, launchers and `time` after the end of a program."""
_END_OF_PROGRAM = re.compile(
    r"\s+at \S|Caused by: |\s+\.\.\. \d+ more|\s*\[\d+\] |\s+@ |#\d+ +0x|\s*\d+: +\S|Backtrace"
    r"|(?i:stack ?(?:back)?trace)"
    r"|in expression starting at|note: run with|goroutine \d+|exit status \d+|Execution halted|Calls: |\s+what\(\): "
    r"|Image +PC|Error termination|(?:Current t|T)hread 0x|\s+File \"|Extension modules:|Job step aborted|Stack dump"
)
"""Lines of a language's runtime behind the error that ends a program."""
_EXCEPTION_NAME = re.compile(r"[\w.]*(?:Error|Exception): ")
_PROGRESS = re.compile(r"(?i)\b(?:epoch|step|iter(?:ation)?|loss|info|debug|going on|skip\w*|continu\w+|retry\w*)\b")
"""Output that may follow an exception directly and does not belong to its message."""
_SEVERAL = re.compile(
    r"torch[./]distributed[./](?:elastic|run|launch)|: tasks \d|mpirun|mpiexec|NCCL|c10d|gloo|deepspeed"
)
"""Words of a log to which several ranks may write without labels."""
_STAMP = re.compile(
    r"\[?(?:\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[T ]|[IWEF](?P<date>\d{3,4}) )"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
)
_VAGUE = ("cancelled", "step-time-limit")
"""Without a reason, and of a step that may have ended with its job."""
_VERDICTS = {"time-limit", "preempted", "node-failed", *_VAGUE}
"""Ends of a job or step that Slurm reports, with the reason."""
RECENT_LINES = 500
"""Other matches are searched this many lines before the last one."""
_LONG, _LONG_EARLIER = 2000, 500
"""Characters of a line that are compared with rules: of the last lines, and of earlier ones."""
_RANKS = 16
"""Ranks with a last exception that is compared with lines without a label."""
_BETWEEN_RANKS = {"nccl-error", "mpi-error", "mpi-abort", "network-unreachable", "loopback-address", "interrupted"}
_WAITS = {"collective-timeout", "rendezvous-timeout"}
"""Causes that ranks report because another one does not come: why it failed says more."""


class Fate(Enum):
    """The fate of the process that printed an exception."""

    ENDED = auto()
    """Nothing shows that it went on."""
    ELSEWHERE = auto()
    """A thread, task or child process ended; the program may have gone on."""
    IGNORED = auto()
    """Python passed over it."""


class Match(NamedTuple):
    """A line that a rule explains, and the values of the rule's groups."""

    rule: Rule
    line: LogLine
    values: dict[str, str]
    traceback: int | None = None
    """The number of the traceback, chained ones included, that it ends; None: no traceback."""
    fate: Fate = Fate.ENDED
    is_last_words: bool = False
    """The runtime of a language prints such a line when an error ends the program."""
    is_exception: bool = False
    """It is the line that names the exception, and no further line of its message."""
    is_quoted: bool = False
    """The text is part of a sentence: it may describe another error, or a handled one."""
    is_doubtful: bool = False
    """Another line of the log contradicts it."""
    place: int = 0
    """Its place among all lines."""
    time: tuple[float, ...] | None = None
    """Month, day, and the seconds of the day, where the line or the record above its traceback has them."""
    after: int = 0
    """How many ordinary lines its rank printed behind it."""

    @property
    def raised(self) -> bool:
        """Whether it is an exception that ends a program, and not a consequence of another rank's end."""
        ends = self.is_last_words or (self.traceback is not None and self.fate is Fate.ENDED)
        return ends and self.rule.kind is not Kind.CONSEQUENCE

    @property
    def is_early(self) -> bool:
        """Whether the program went on after it."""
        return self.after > 0 and not self.is_report

    @property
    def may_crash(self) -> bool:
        """Whether a crash of its program may follow from it, and not only an exit: not from a line of a tool."""
        return self.raised or self.is_report or _LIBRARY.match(self.line.text) is not None

    @property
    def is_report(self) -> bool:
        """Whether Slurm or the system report it, and not the program."""
        return _OUTSIDE.match(self.line.text) is not None


def find_matches(lines: Sequence[LogLine], rules: Sequence[Rule] = RULES) -> Iterator[Match]:
    """Each line that a rule explains, with the first such rule, in the order of the lines."""
    tracebacks = _Tracebacks()
    stamps: dict[int | None, tuple[float, ...] | None] = {}
    for index, line in enumerate(lines):
        part = tracebacks.place(line)
        if part.role is Role.FRAME:
            continue  # the program's own text, which may quote anything
        if part.traceback is None or _STAMP.match(line.text):
            stamps[line.rank] = _time_of(line.text)
        if _COMMAND.match(line.text):
            continue
        is_earlier = index < len(lines) - RECENT_LINES
        match = _first_match(line, _shorten(line.text, _LONG_EARLIER if is_earlier else _LONG), rules)
        if match is None and part.role is Role.EXCEPTION and (exception := _EXCEPTION.pattern.match(line.text)):
            match = Match(_EXCEPTION, line, _values(exception))
        if match is not None:
            yield match._replace(
                traceback=part.traceback,
                fate=part.fate,
                is_last_words=part.fate is Fate.ENDED and LAST_WORDS.match(line.text) is not None,
                is_exception=part.role is Role.EXCEPTION,
                place=index,
                time=stamps.get(line.rank),
            )


def _time_of(text: str) -> tuple[float, ...] | None:
    if (stamp := _STAMP.match(text)) is None:
        return None
    date = stamp["date"] or stamp["month"] + stamp["day"]
    seconds = int(stamp["hour"]) * 3600 + int(stamp["minute"]) * 60 + float(stamp["second"].replace(",", "."))
    return float(date[:-2]), float(date[-2:]), seconds


class Role(Enum):
    """The role of a line in a traceback."""

    NONE = auto()
    FRAME = auto()
    EXCEPTION = auto()
    MESSAGE = auto()
    """A further line of the exception's message."""


class _Part(NamedTuple):
    """The traceback that a line belongs to."""

    role: Role = Role.NONE
    traceback: int | None = None
    fate: Fate = Fate.ENDED


class _Ended(NamedTuple):
    traceback: int
    fate: Fate
    left: int
    """How many lines of its message may come."""


class _Tracebacks:
    """Numbers the tracebacks of each rank; chained ones have one number."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[int | None, tuple[int, Fate]] = {}
        self._ended: dict[int | None, _Ended] = {}
        """The last one of each rank."""
        self._chained: dict[int | None, tuple[int, Fate]] = {}
        self._introduced: dict[int | None, tuple[Fate, int]] = {}
        """How Python introduces the next exception of a rank, and for how many lines that holds."""

    def place(self, line: LogLine) -> _Part:
        """The role of a line in the last traceback of its rank."""
        rank, text = line.rank, line.text
        if TRACEBACK in text:
            self._count += 1
            fate, _ = self._introduced.pop(rank, (Fate.ENDED, 0))
            self._open[rank] = self._chained.pop(rank, (self._count, fate))
            self._ended.pop(rank, None)
            return _Part(Role.FRAME, *self._open[rank])
        if rank in self._open:
            if _OUTSIDE.match(text) or signal_reported_by_shell(text):  # written between the lines of a task
                return _Part()
            if not text.strip() or text.startswith((" ", "\t")):
                return _Part(Role.FRAME, *self._open[rank])
            number, fate = self._open.pop(rank)
            self._ended[rank] = _Ended(number, fate, _MESSAGE_LINES if fate is Fate.ENDED else 0)
            return _Part(Role.EXCEPTION, *self._ended[rank][:2])
        if (introduced := _introduced_fate(text)) is not None:
            self._introduced[rank] = introduced, _INTRODUCTION_LINES
            self._ended.pop(rank, None)
            return _Part()
        if rank in self._introduced:
            return self._introduced_line(rank, text)
        return self._message(rank, text)

    def _introduced_line(self, rank: int | None, text: str) -> _Part:
        fate, left = self._introduced.pop(rank)
        if _EXCEPTION_NAME.match(text):  # of an exception without a traceback
            self._count += 1
            return _Part(Role.EXCEPTION, self._count, fate)
        if left > 1:
            self._introduced[rank] = fate, left - 1
        return _Part()

    def _message(self, rank: int | None, text: str) -> _Part:
        if rank not in self._ended:
            return _Part()
        number, fate, left = self._ended[rank]
        if _CHAINED.search(text):
            self._chained[rank] = number, fate
        if not left or _OUTSIDE.match(text) or _PROGRESS.search(text) or signal_reported_by_shell(text):
            del self._ended[rank]
            return _Part()
        self._ended[rank] = _Ended(number, fate, left - 1)
        return _Part(Role.MESSAGE, number, fate)


def _introduced_fate(text: str) -> Fate | None:
    if not any(part in text for part in ("xception", "rror", "Process")):  # most lines: this costs little
        return None
    if _IGNORED.search(text):
        return Fate.IGNORED
    return Fate.ELSEWHERE if _ELSEWHERE.search(text) else None


def choose_match(matches: Iterable[Match], first_rank: int | None, lines: Sequence[LogLine] = ()) -> Match | None:
    """The match that shows the cause.

    Slurm's report of the end of the job counts more than errors that the program survived; an unhandled exception more
    than the lines before it; a program's own error more than reports of ranks about each other.
    Then the rank that failed first counts, then the first match in the log: later ones are often the same error,
    wrapped.
    """
    output = _Output(lines)
    every = _drop_ignored(output.count_after(list(matches)))
    recent = _drop_refuted(_keep_recent(_drop_survived(every, output)), output)
    recent = _drop_explained(recent)
    fatal = [match for match in recent if is_of_program(match) and match.after <= _FEW_LINES]
    last = [m for m in recent if m.after <= _FEW_LINES and m.rule.kind is not Kind.CONSEQUENCE and not _is_of_ranks(m)]

    def importance(match: Match) -> tuple[bool, bool, bool, int]:
        other = match.line.rank not in (None, first_rank) if first_rank is not None else False
        went_on = bool(last) and match.after > _FEW_LINES
        is_behind = went_on or (bool(fatal) and match not in fatal and _is_of_ranks(match))
        return match.rule.kind is Kind.CONSEQUENCE, is_behind, other, match.rule.kind.value

    best = min(recent, key=importance, default=None)
    if best is None or best.is_report:
        return best
    best = _end_of_chain(best, recent)
    if best.fate is not Fate.ENDED:
        best = best._replace(is_doubtful=True)
    if best in fatal:
        is_timed = all(match.time for match in fatal)
        first = min(fatal, key=lambda match: (match.time or () if is_timed else (), match.place))
        return best if first.line.rank == best.line.rank else _end_of_chain(first, recent)._replace(is_doubtful=True)
    if best.raised:
        return best._replace(is_doubtful=best.is_doubtful or best.after > _FEW_LINES)
    same = (best.rule.cause, best.line.rank)
    if any(match.raised and (match.rule.cause, match.line.rank) == same for match in recent):
        return best._replace(is_quoted=False)  # the rank ended with the same cause: it did not survive the error
    others = {match.rule.cause for match in recent if match.rule.kind is Kind.CAUSE and not match.is_quoted}
    # A handler prints an exception without its traceback: the program may have gone on until a later error.
    handled = best.after > 0 and _EXCEPTION_NAME.match(best.line.text) is not None
    goes_on = handled and any(m.place > best.place and m.rule.kind is Kind.ERROR and not m.is_quoted for m in recent)
    doubtful = best.is_doubtful or goes_on or bool(others - {best.rule.cause}) or best.after > _FEW_LINES
    return best._replace(is_doubtful=doubtful)


@dataclass(frozen=True)
class _Output:
    """The ordinary output of a program: neither errors nor reports about it."""

    lines: Sequence[LogLine]

    def count_after(self, matches: Sequence[Match]) -> list[Match]:
        """The matches, each with how much its rank printed behind it."""
        counts: dict[int | None, int] = {}
        ordinary = self._find_ordinary({match.place for match in matches})
        counted: list[Match] = []
        left = list(matches)
        for index in range(len(self.lines) - 1, -1, -1):
            while left and left[-1].place == index:
                match = left.pop()
                counted.append(match._replace(after=max(counts.get(match.line.rank, 0), self._elsewhere(match))))
            if ordinary[index]:
                rank = self.lines[index].rank
                counts[rank] = counts.get(rank, 0) + 1
        return counted[::-1]

    def _elsewhere(self, match: Match) -> int:
        """Lines that count as later output if the output is in another file and the order is unknown."""
        if match.raised or match.line.rank is not None or match.line.file == self.lines[0].file:
            return 0
        return _FEW_LINES + 1

    def _find_ordinary(self, explained: set[int]) -> list[bool]:
        tracebacks = _Tracebacks()
        ordinary: list[bool] = []
        for index, line in enumerate(self.lines):
            is_output = tracebacks.place(line).role is Role.NONE
            reports = (_OUTSIDE, _COMMAND, _AFTERWARDS, _END_OF_PROGRAM)
            is_report = any(pattern.match(line.text) for pattern in reports) or bool(
                signal_reported_by_shell(line.text)
            )
            ordinary.append(is_output and not is_report and index not in explained)
        return ordinary

    def has_progress(self, start: int, end: int, *, of_all: bool = False) -> bool:
        """Whether lines between two places show that a program goes on: lines without a label, or all."""
        texts = (line.text for line in self.lines[start + 1 : end] if of_all or line.rank is None)
        return any(
            not _OUTSIDE.match(text) and not text.startswith((" ", "Traceback")) and _PROGRESS.search(text)
            for text in texts
        )

    @property
    def is_of_one_program(self) -> bool:
        """Whether no line has a label of a rank, and no word names several ranks."""
        return not any(line.rank is not None or _SEVERAL.search(line.text) for line in self.lines)


def _drop_ignored(matches: list[Match]) -> list[Match]:
    """Drop exceptions that Python passed over; alone, one may still name the cause (a full disk at the exit)."""
    left = [match for match in matches if match.fate is not Fate.IGNORED]
    named = [match for match in matches if match.rule.kind is Kind.CAUSE and match.after == 0]
    return left or named


def _end_of_chain(best: Match, matches: Sequence[Match]) -> Match:
    """Of chained exceptions without a known cause the last one: the program ended with it."""
    if best.rule.kind is not Kind.ERROR or best.traceback is None:
        return best
    chain = [m for m in matches if m.traceback == best.traceback and m.is_exception and m.rule.kind is Kind.ERROR]
    return chain[-1] if chain else best


def _drop_survived(matches: list[Match], output: _Output) -> list[Match]:
    """Drop matches that the program survived, by much later output or by Slurm's report of the end."""
    left = [m for m in matches if m.raised or m.after < _many_lines(m) or _may_be_last(m)]
    ends = [m for m in left if m.is_report and m.rule.cause in _VERDICTS]
    if ends:
        end = _choose_verdict(ends, output)
        before = [m for m in left if m.place < end.place and m.rule.cause not in _VERDICTS]
        behind = [m for m in left if m.place > end.place]
        if any(m.raised for m in behind) and output.has_progress(end.place, len(output.lines), of_all=True):
            return left  # the job was started again: the lines after it have the cause
        fatal = [m._replace(is_doubtful=True) for m in before if is_of_program(m) and m.after == 0]
        if any(output.has_progress(m.place, end.place) for m in fatal):  # of a rank without a label: which one?
            return [end._replace(is_doubtful=True)]
        memory = [m for m in before if m.rule.cause == "out-of-memory" and m.is_report]
        if end.rule.cause == "cancelled" and not fatal:  # by whoever saw the job hang behind its error
            last = [m for m in before if m.after == 0 and m.rule.kind is not Kind.CONSEQUENCE]
            fatal = [m._replace(is_doubtful=True) for m in last]
        return fatal or memory or [end]
    if any(m.rule.cause == "out-of-memory" and m.is_report for m in left):
        left = [m for m in left if m.raised or m.is_report or m.rule.kind is not Kind.CAUSE]
    return left


def _choose_verdict(ends: Sequence[Match], output: _Output) -> Match:
    """Of Slurm's last reports, without output of a program between them, one with a reason, about the job."""
    last = [end for end in ends if not output.has_progress(end.place, ends[-1].place)]
    return min(last, key=lambda end: (*(end.rule.cause == cause for cause in _VAGUE), "host" not in end.values))


def _many_lines(match: Match) -> int:
    """How much output shows that the program did without: a handler prints an exception without a traceback."""
    return _FEW_LINES + 1 if _EXCEPTION_NAME.match(match.line.text) else _MANY_LINES


def _may_be_last(match: Match) -> bool:
    """Whether later output does not disprove it: reports of Slurm, and of ranks about each other."""
    return (
        match.is_report or match.line.host is not None
        or match.rule.kind is Kind.CONSEQUENCE or _is_of_ranks(match) or _LIBRARY.match(match.line.text) is not None
    )  # fmt: skip


def _is_of_ranks(match: Match) -> bool:
    """Whether it reports of the talk between ranks, which fails after one of them has failed."""
    if match.rule.kind is Kind.CAUSE:
        return match.rule.cause in _BETWEEN_RANKS | _WAITS
    return match.rule.cause in _BETWEEN_RANKS or _OF_RANKS.search(match.line.text) is not None


def _drop_refuted(matches: list[Match], output: _Output) -> list[Match]:
    """Drop matches that a later exception disproves: of the same rank, or of any rank for lines without a label."""
    finals = {match.line.rank: n for n, match in enumerate(matches) if match.raised}
    some = list(finals.values())[:_RANKS]
    program_failed = any(is_of_program(match) for match in matches)
    is_one = output.is_of_one_program
    doubtful: set[int] = set()
    left: list[int] = []
    for index, match in enumerate(matches):
        own = some if match.line.rank is None else [finals[match.line.rank]] if match.line.rank in finals else []
        later = [n for n in own if n > index and (match.traceback is None or matches[n].traceback != match.traceback)]
        refuting = [n for n in later if _refutes(matches[n], match, is_one=is_one)]
        if refuting:
            doubtful |= set(refuting) if match.rule.kind is Kind.CAUSE and not match.is_quoted else set()
        elif match.rule.cause not in _WAITS or not program_failed:
            left.append(index)
            doubtful |= {index} if any(_contradicts(matches[n], match) for n in later) else set()
    return [matches[n]._replace(is_doubtful=matches[n].is_doubtful or n in doubtful) for n in left]


def _refutes(later: Match, match: Match, *, is_one: bool) -> bool:
    """Whether the program continued after ``match``, until another error ended it."""
    if match.raised:
        # Without labels each of several ranks may have raised one.
        return match.line.rank is not None or is_one
    if match.is_report:
        return _JOB_ENDED.search(match.line.text) is not None  # an attempt before this one
    if later.rule.cause in match.rule.more_precise_than or _OF_CHILD.search(later.line.text):
        return False
    if later.traceback is None and match.after == later.after:
        return False  # the lines before the program's last lines may give the reason
    return not (_LIBRARY.match(match.line.text) and _OF_RANKS.search(later.line.text))


def _contradicts(later: Match, match: Match) -> bool:
    """Whether ``later`` may be the cause as well."""
    if match.is_report or later.rule.cause == match.rule.cause:
        return False
    return match.rule.kind is Kind.CAUSE and (is_of_program(later) or later.rule.cause in match.rule.more_precise_than)


def is_of_program(match: Match) -> bool:
    """Whether it is an exception about anything but the talk between ranks."""
    return match.raised and not _is_of_ranks(match)


def is_independent(match: Match, *, of: int | None, first: int | None) -> bool:
    """Whether it is an error of the program in another rank than ``of``; ``first``: the rank without a label."""
    rank = match.line.rank if match.line.rank is not None else first
    is_error = match.rule.kind is not Kind.CONSEQUENCE and not _is_of_ranks(match) and not match.is_report
    return is_error and match.after == 0 and None not in (rank, of) and rank != of


def _drop_explained(matches: list[Match]) -> list[Match]:
    """Drop causes if the same rank, or Slurm, reports a more precise one."""
    explained = {(match.line.rank, cause) for match in matches for cause in match.rule.more_precise_than}
    return [m for m in matches if not {(m.line.rank, m.rule.cause), (None, m.rule.cause)} & explained]


def _keep_recent(matches: list[Match]) -> list[Match]:
    """Keep matches near the last one of their rank: a program may survive earlier errors."""
    last = {match.line.rank: match.line.number for match in matches}
    return [match for match in matches if match.line.number > last[match.line.rank] - RECENT_LINES]


def _first_match(line: LogLine, text: str, rules: Sequence[Rule]) -> Match | None:
    """The first rule that explains ``text``: the line or its compared parts."""
    if not may_explain(text):
        return None
    for rule in rules:
        if match := rule.pattern.search(text):
            return Match(rule, line, _values(match), is_quoted=_is_quoted(text, match.start()))
    return None


def _shorten(text: str, length: int) -> str:
    """The beginning and the end of a long line: the operation comes first in it, the reason last."""
    if len(text) <= length:
        return text
    end = length * 2 // 5
    return f"{text[: length - end]} ... {text[-end:]}"


def _is_quoted(text: str, start: int) -> bool:
    """Whether the match at ``start`` is part of a quotation, a sentence or a warning."""
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
