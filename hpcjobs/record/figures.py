"""Figures of merit that a program prints into its log: how a line is read, and the results in summary.json.

A rule has a regular expression with one group, or a path in lines that are JSON objects. Lines come from any program:
at most `LINE_CHARACTERS` of a line are looked at, and a search that takes longer than `SEARCH_S` is given up.
"""

import json
import math
import re
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Pattern

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
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_BEHIND = re.compile(r"[\s,;:%)\]}'\"|]*\Z")
_LABEL = re.compile(r" *\d+: ")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}


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

    def search(self, pattern: Pattern[str], text: str) -> Optional[str]:
        signal.signal(signal.SIGVTALRM, self._expire)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_S)
        try:
            match = pattern.search(text)
        finally:
            self._is_armed = False  # a signal from here on comes too late to matter
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return None if match is None else match.group(1)

    def _expire(self, _number: int, _frame: object) -> None:
        if self._is_armed:
            raise SearchTooSlow


class FigureReader:
    """Reads the values of one figure, line by line.

    Raises:
        re.error: this Python cannot read the pattern.
    """

    def __init__(self, rule: FigureRule) -> None:
        self.rule = rule
        self.unreadable = ""
        """The last text that the rule found and that is no finite number; empty: none."""
        self.is_given_up = False
        self.values = Readings()
        self._pattern = None if rule.pattern is None else re.compile(rule.pattern)
        self._keys = [] if rule.json_path is None else rule.json_path.split(".")
        self._limit = _Limit()
        self._slow = 0

    def read(self, line: str, *, labelled: bool = False) -> Optional[float]:
        """The value that the line holds, which is added to the values; None: it holds none.

        ``labelled``: lines may begin with the rank and a colon (srun --label).
        """
        if self.is_given_up:
            return None
        label = _LABEL.match(line) if labelled else None
        text = line[label.end() :] if label is not None else line
        number = self._find_json(text) if self._pattern is None else self._find(self._pattern, text)
        if number is None:
            return None
        value = parse_number(number, self.rule.unit)
        if value is None:
            self.unreadable = number[:80]
            return None
        self.values.add(value)
        return value

    def _find(self, pattern: Pattern[str], text: str) -> Optional[str]:
        try:
            return self._limit.search(pattern, text[:LINE_CHARACTERS])
        except SearchTooSlow:
            self._slow += 1
            self.is_given_up = self._slow >= MOST_SLOW_SEARCHES
            return None

    def _find_json(self, text: str) -> Optional[str]:
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
        return None if value is None or isinstance(value, (dict, list, bool)) else str(value)

    def result(self) -> Optional[FigureResult]:
        """The figure of all values; None: no line had one."""
        values, rule = self.values, self.rule
        if values.last is None:
            return None
        median = values.median
        value = values.last if rule.take == LAST else median
        return FigureResult(
            value, rule.unit, rule.better, rule.take, values.count, values.last, median, values.least, values.most
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
    """The finite number that ``text`` is, with commas between thousands; None: it is none.

    Punctuation, a percent sign or the unit may follow; other letters do not: 12.3k is not 12.3.
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


def split_lines(chunk: bytes) -> List[str]:
    """The lines of complete text; a carriage return ends one too, as progress bars write it."""
    return [line.decode("utf-8", "replace") for line in re.split(rb"[\r\n]+", chunk) if line]


def results_of(summary: Dict[str, Any]) -> Dict[str, FigureResult]:
    """The figures of a summary.json, the first one is the figure of the run; what is none of them is left out."""
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
    """The figures of the summary.json ``path``; empty where there is none that can be read."""
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
