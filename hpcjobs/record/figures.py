"""Figures of merit that a program prints into its log: how a line is read, and the results in summary.json.

A rule has a regular expression with one group, or a path in lines that are JSON objects. Lines come from any program:
at most `LINE_CHARACTERS` of a line are looked at, and a search that takes longer than `SEARCH_S` is given up.
"""

import json
import math
import re
import signal
from typing import Any, Dict, List, Match, NamedTuple, Optional, Pattern, Tuple

from hpcjobs.files import AnyPath, read_regular
from hpcjobs.record.values import convert

MORE, LESS = "more", "less"
MEDIAN, LAST = "median", "last"
LINE_CHARACTERS = 2000
JSON_CHARACTERS = 1 << 16
SEARCH_S = 0.2
"""CPU time of one search."""
MOST_SLOW_SEARCHES = 3
"""A rule is ignored after this many searches exceeded their time."""
MOST_VALUES = 10000
"""Kept for the median; of more values every second one, then every fourth and so on."""
LOG_SOURCE = "log"
"""``source`` of a summary.json that was made from the log alone."""
_NUMBER = re.compile(r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_BEHIND = re.compile(r"[\s,;:%)\]}'\"|]*\Z")
_DIGITS_GO_ON = re.compile("[\u00a0\u2009\u202f'\u2019]\\d")
"""Text behind a number that continues it: a separator of thousands other than a comma, and a digit."""
_DECIMAL_COMMA = re.compile(
    "[-+]?(?:0,\\d|\\d+,(?:\\d{1,2}|\\d{4,})(?!\\d)|\\d{4,},\\d|\\d[\\d.\u00a0\u2009\u202f'\u2019]*[^\\d,]\\d{3},\\d)"
)
"""A number with a comma that can only be its decimal sign: 0,123 or 1234,5 or 1.234,5."""
_LABEL = re.compile(r" *\d+: ")
_HOROVODRUN_LABEL = re.compile(r"\[(?:\d+,)?\d+\]<std(?:out|err)>:")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9,
             "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}  # fmt: skip
_LARGE = "(?:[KMGT]i|[kKMGTP])"
_ANY_PREFIX = "(?:[KMGT]i|[kKMGTPmuµn])"
_PREFIX = re.compile(rf"{_LARGE}(?=B|b(?:it|yte)|[Ff]lop|FLOP|tok|atom|samples?/|steps?/)|[muµn](?=s(?:/|\Z))")
_UNIT = re.compile(rf"\s?((?:[A-Za-zµ][A-Za-z-]*/[A-Za-z]+|{_LARGE}?(?:B|bytes|[Ff]lops|FLOPS)|[muµn]?s)(?![\w/]))")
"""A unit behind a number: a rate, an amount of data or of operations, a time."""


class FigureRule(NamedTuple):
    """How one figure is read, as the node gets it."""

    name: str
    pattern: Optional[str] = None
    json_path: Optional[str] = None
    unit: str = ""
    better: str = MORE
    take: str = MEDIAN


class FigureResult(NamedTuple):
    """A figure of one run: an entry of ``figures`` in summary.json."""

    value: float
    """The median or the last value, as ``take`` says."""
    unit: str
    better: str
    take: str
    readings: int
    """Readings that were read."""
    last: float
    median: float
    least: float
    most: float

    @property
    def throughput(self) -> float:
        """The value where more is better; of a time its inverse, per second."""
        return self.value if self.better == MORE else 1 / (self.value * _SECONDS.get(self.unit, 1.0))

    @property
    def throughput_unit(self) -> str:
        """The unit of `throughput`."""
        if self.better == MORE:
            return self.unit
        if self.unit in _SECONDS:
            return "1/s"
        return f"1/({self.unit})" if "/" in self.unit else f"1/{self.unit}" if self.unit else "1/value"


class SearchTooSlow(Exception):
    """A search of a line took longer than `SEARCH_S`."""


class _Limit:
    """Ends a search after `SEARCH_S` of CPU time: re looks for signals while it searches."""

    def __init__(self) -> None:
        self._is_armed = False

    def search(self, pattern: Pattern[str], text: str) -> Optional[Match[str]]:
        signal.signal(signal.SIGVTALRM, self._expire)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_S)
        try:
            match = pattern.search(text)
        finally:
            self._is_armed = False  # a signal from here on comes too late to matter
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return match

    def _expire(self, _number: int, _frame: object) -> None:
        if self._is_armed:
            raise SearchTooSlow


class FigureReader:
    """Reads the values of one figure, line by line, in one unit.

    Raises:
        re.error: this Python cannot read the pattern.
    """

    def __init__(self, rule: FigureRule) -> None:
        self.rule = rule
        self.unreadable = ""
        """The last matched text that is not a finite number; empty: none."""
        self.other_unit = ""
        """A printed unit that cannot be converted to the first one; empty: none."""
        self.is_given_up = False
        self.values = Readings()
        self._pattern = None if rule.pattern is None else re.compile(_with_related_units(rule.pattern, rule.unit))
        self._keys = [] if rule.json_path is None else rule.json_path.split(".")
        self._limit = _Limit()
        self._slow = 0
        self._printed_unit = ""
        self._has_commas = self._comma_is_decimal = False

    @property
    def unit(self) -> str:
        """The unit of the values: from the rule, otherwise from the program's text behind the number."""
        return self.rule.unit or self._printed_unit

    def read(self, line: str, *, labelled: bool = False) -> Optional[float]:
        """The value that the line holds, which is added to the values; None: it holds none.

        ``labelled``: lines may begin with the rank and a colon (srun --label). The label of horovodrun and of
        mpirun --tag-output is always removed.
        """
        if self.is_given_up:
            return None
        label = (_LABEL.match(line) if labelled else None) or _HOROVODRUN_LABEL.match(line)
        text = line[label.end() :] if label is not None else line
        match = self._find_json(text) if self._pattern is None else self._find(self._pattern, text)
        if match is None:
            return None
        number, behind, unit = match
        value = None if self._is_ambiguous(number, behind) else parse_number(number, unit)
        if value is None:
            self.unreadable = (number + behind)[:80].partition(" ")[0]
            return None
        return self._add(value, unit)

    def _is_ambiguous(self, number: str, behind: str) -> bool:
        """Whether the number goes on, or has a comma that may be its decimal sign."""
        if _DECIMAL_COMMA.match(number.lstrip("'\"([")) and not self._comma_is_decimal:
            self._comma_is_decimal = True
            if self._has_commas:
                self.values = Readings()
        self._has_commas = self._has_commas or "," in number.rstrip(",")
        return _DIGITS_GO_ON.match(behind) is not None or (self._comma_is_decimal and "," in number.rstrip(","))

    def _add(self, value: float, unit: str) -> Optional[float]:
        if unit and not self._printed_unit:
            own = self.rule.unit
            self._printed_unit = (unit if convert_unit(1.0, unit, own) is None else own) if own else _split(unit)[1]
        converted = convert_unit(value, unit, self._printed_unit) if unit else value
        if converted is None:
            self.other_unit = unit
            return None
        self.values.add(converted)
        return converted

    def _find(self, pattern: Pattern[str], text: str) -> Optional[Tuple[str, str, str]]:
        """The number, the text behind it, and its unit; None without a number."""
        try:
            match = self._limit.search(pattern, text[:LINE_CHARACTERS])
        except SearchTooSlow:
            self._slow += 1
            self.is_given_up = self._slow >= MOST_SLOW_SEARCHES
            return None
        if match is None:
            return None
        unit_group = pattern.groupindex.get(_UNIT_GROUP)
        group = 1 if unit_group != 1 else 2
        number = match.group(group)
        if number is None:  # in an alternative that is not there
            return None
        behind = text[match.end(group) :][:80]
        if unit_group is not None and match.group(unit_group):
            return number, behind, match.group(unit_group)
        digits = _NUMBER.match(number)
        attached = number[digits.end() :] if digits is not None else ""
        unit = _UNIT.match(attached if self.rule.unit and attached else behind)
        return number, behind, "" if unit is None else unit.group(1)

    def _find_json(self, text: str) -> Optional[Tuple[str, str, str]]:
        start = text.find("{")
        if start < 0 or len(text) > JSON_CHARACTERS or self._keys[-1] not in text:
            return None
        try:
            value = json.loads(text[start:])
        except (ValueError, RecursionError):
            return None
        for key in self._keys:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return None if value is None or isinstance(value, (dict, list, bool)) else (str(value), "", "")

    def result(self) -> Optional[FigureResult]:
        """The figure of all values; None: no line had one."""
        values, rule = self.values, self.rule
        if values.last is None:
            return None
        median = values.median
        value = values.last if rule.take == LAST else median
        return FigureResult(
            value, self.unit, rule.better, rule.take, values.count, values.last, median, values.least, values.most
        )


class Readings:
    """Count, last, extremes and median of values, in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self.last = None  # type: Optional[float]
        self.least, self.most = math.inf, -math.inf
        self._sample = []  # type: List[float]
        self._stride = 1

    def add(self, value: float) -> None:
        if self.count % self._stride == 0:
            self._sample.append(value)
            if len(self._sample) >= MOST_VALUES:
                self._sample, self._stride = self._sample[::2], self._stride * 2
        self.count += 1
        self.last = value
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def median(self) -> float:
        ranked = sorted(self._sample)
        middle = len(ranked) // 2
        return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


def parse_number(text: str, unit: str = "") -> Optional[float]:
    """``text`` as a finite number, with commas between thousands; None for other text.

    Punctuation, a percent sign or the unit may follow; other letters do not: 12.3k is not 12.3. A decimal comma
    is not accepted: 0,123 gives None.
    """
    text = text.strip().lstrip("'\"([")
    match = _NUMBER.match(text)
    if match is None or not any(char.isdigit() for char in match.group()):
        return None
    rest = text[match.end() :].lstrip()
    if unit and rest.startswith(unit):
        rest = rest[len(unit) :]
    if not _BEHIND.match(rest):
        return None
    value = float(match.group().replace(",", ""))
    return value if math.isfinite(value) else None


def convert_unit(value: float, unit: str, target: str) -> Optional[float]:
    """The value in the unit ``target``: MB/s in GB/s, s/it in it/s; None if it cannot be converted."""
    factor, base = _split(unit)
    target_factor, target_base = _split(target)
    if base == target_base:
        return value * (factor / target_factor) if factor >= target_factor else value / (target_factor / factor)
    counted, slash, per = base.partition("/")
    return 1 / (value * factor * target_factor) if slash and f"{per}/{counted}" == target_base and value else None


def _split(unit: str) -> Tuple[float, str]:
    """``GB/s`` -> (1e9, "B/s"): the factor of the prefix, and the unit without the prefix."""
    if unit in _SECONDS:
        return _SECONDS[unit], "s"
    prefix = _PREFIX.match(unit)
    return (1.0, unit) if prefix is None else (_PREFIXES[prefix.group()], unit[prefix.end() :])


_UNIT_GROUP = "unit_of_figure"


def _with_related_units(pattern: str, unit: str) -> str:
    """The pattern with a group in place of its unit that also matches GB/s for MB/s, and s/it for it/s."""
    begin, base = pattern.find(unit), _split(unit)[1]
    end = begin + len(unit)
    before, behind = pattern[:begin], pattern[end : end + 1]
    is_word = not (before[-1:].isalnum() or before.endswith("\\") or behind.isalnum() or behind in tuple("?*+{"))
    is_in_set = before.count("[") != before.count("]")
    if not unit or pattern.count(unit) != 1 or not unit.endswith(base) or not is_word or is_in_set:
        return pattern
    counted, slash, per = base.partition("/")
    inverse = rf"|{_ANY_PREFIX}?{re.escape(per)}/{re.escape(counted)}" if slash else ""
    return f"{before}(?<![kKMGTPmuµni])(?P<{_UNIT_GROUP}>{_ANY_PREFIX}?{re.escape(base)}{inverse}){pattern[end:]}"


def split_lines(chunk: bytes) -> List[str]:
    """The lines of complete text; a carriage return ends one too, as progress bars write it."""
    return [line.decode("utf-8", "replace") for line in re.split(rb"[\r\n]+", chunk) if line]


def results_of(summary: Dict[str, Any]) -> Dict[str, FigureResult]:
    """The figures of a summary.json, the first one is the figure of the run; invalid entries are left out."""
    raw = summary.get("figures")
    figures = {}
    for name, entry in raw.items() if isinstance(raw, dict) else ():
        try:
            result = convert(entry, FigureResult)
        except ValueError:
            continue
        if math.isfinite(result.value) and result.better in (MORE, LESS):
            figures[str(name)] = result
    return figures


def read_results(path: AnyPath) -> Dict[str, FigureResult]:
    """The figures of the summary.json ``path``; empty if the file cannot be read."""
    try:
        summary = json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return results_of(summary) if isinstance(summary, dict) else {}


_RATE = r"[A-Za-z][A-Za-z-]*/(?:s|sec|second|min|h|hour|day)\b"
_RATE_BEFORE = re.compile(rf"({_RATE})([ :=]+)[\d.,]+(?:[eE][-+]?\d+)?(?=[\s,;)\]]|$)")
_RATE_BEHIND = re.compile(rf"(?:^|[\s(\[=:])[\d.,]+(?:[eE][-+]?\d+)?( ?)({_RATE})")


def find_rate(line: str) -> Optional[str]:
    """A pattern for ``--metric`` that reads the rate that the line prints; None: it prints none."""
    line = line[:LINE_CHARACTERS]
    before, behind = _RATE_BEFORE.search(line), _RATE_BEHIND.search(line)
    if before is not None:
        return f"{before.group(1)}{before.group(2)[:1] if before.group(2).strip() == '' else '[ :=]+'}(\\S+)"
    return None if behind is None else f"([0-9.,]+){behind.group(1)}{behind.group(2)}"
