"""Figures of merit: patterns of printed values for the speed or quality of a run; presets of known programs."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from hpcjobs.errors import nearest
from hpcjobs.site.checks import Frozen, check_line

_TOKEN = r"[A-Za-z_%][\w/%.-]*"
_OPTIONS = re.compile(r"\s*;\s*(name|unit|better|take)\s*=\s*([^;]*?)\s*\Z")
_JSON_PATH = re.compile(r"[^\s.]+(\.[^\s.]+)*\Z")
_LONGEST: Final = 500
_LONGEST_NAME: Final = 60


class Figure(Frozen, frozen=True):
    """How a figure is read from the lines of a job's log."""

    pattern: str | None = None
    """Regular expression with one group, which is the number; searched in each line."""
    json: str | None = None
    """Path of the number in lines that are JSON objects: ``train.tokens_per_s``."""
    unit: str | None = None
    """Its unit; ``None``: a word such as ``tokens/s`` of the pattern, if there is one."""
    better: Literal["more", "less"] = "more"
    """Which of two values is better; for a time, ``less``."""
    take: Literal["median", "last"] = "median"
    """Which of the values that a run prints is its result."""

    def __post_init__(self) -> None:
        if (self.pattern is None) == (self.json is None):
            raise ValueError("a figure has either pattern or json")
        for field in ("pattern", "json", "unit"):
            value = getattr(self, field)
            if value is not None:
                check_line(value, field)
                if len(value) > _LONGEST:
                    raise ValueError(f"{field} has {len(value)} characters, at most {_LONGEST} are allowed")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if self.json is not None and not _JSON_PATH.match(self.json):
            raise ValueError(f"json {self.json!r}: expected keys with dots between them: train.tokens_per_s")

    @property
    def unit_text(self) -> str:
        """The unit, also where only the pattern names it; empty: none."""
        if self.unit is not None:
            return self.unit
        token = _find_unit(self.pattern) if self.pattern is not None else None
        return token if token is not None and "/" in token else ""


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    if groups != 1:
        raise ValueError(
            f"pattern {pattern!r} has {groups} groups, expected one around the number: 'tokens/s (\\S+)'; (?:...) is"
            " no group"
        )


def _find_unit(pattern: str) -> str | None:
    """The word of a pattern that is next to its group: ``tokens/s`` of ``tokens/s (\\S+)``."""
    start = re.search(r"(?<!\\)(?:\\\\)*\((?!\?)|(?<!\\)\(\?P<", pattern)
    before, behind = (pattern, "") if start is None else (pattern[: start.start()], _behind_group(pattern, start.end()))
    plain = [re.sub(r"\\[a-zA-Z]|[][^$.*+?{}|()\\]", " ", text) for text in (before, behind)]
    tokens = [re.findall(_TOKEN, text) for text in plain]
    units = [token for token in (*reversed(tokens[0]), *tokens[1]) if "/" in token]
    others = [*reversed(tokens[0]), *tokens[1]]
    return next(iter(units or others), None)


def _behind_group(pattern: str, position: int) -> str:
    depth, escaped = 1, False
    for index, char in enumerate(pattern[position:], position):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return pattern[index + 1 :]
    return ""


PRESETS: Final[dict[str, dict[str, Figure]]] = {
    "lammps": {"timesteps/s": Figure(pattern=r"^Performance: .*?([\d.]+) timesteps/s", take="last")},
    "gromacs": {"ns/day": Figure(pattern=r"^Performance: +([\d.]+) +[\d.]+ *$", unit="ns/day", take="last")},
    "hpl": {"Gflops": Figure(pattern=r"^W[RC]\w+(?: +\d+){4} +[\d.]+ +([\d.e+-]+)", unit="Gflops", take="last")},
    "nanogpt": {
        "iteration": Figure(pattern=r"^iter \d+: loss \S+, time ([\d.]+)ms", unit="ms", better="less"),
        "loss": Figure(pattern=r"^iter \d+: loss ([\d.]+|nan),", better="less", take="last"),
    },
    "huggingface": {
        "samples/s": Figure(pattern=r"'train_samples_per_second': '?([\d.]+)", unit="samples/s", take="last"),
        "loss": Figure(pattern=r"'train_loss': '?([\d.]+)", better="less", take="last"),
    },
}
"""Figures of known programs, by the name that ``--metric`` and ``figures:`` accept."""


def parse_metric(text: str) -> dict[str, Figure]:
    """The figures that ``--metric`` names: a preset, ``json:PATH``, or a regular expression with one group.

    Behind it may stand ``; name=..; unit=..; better=less; take=last``. Without a name it is the word that stands next
    to the group, or the last key of the path.

    Raises ValueError: not a figure.
    """
    options: dict[str, str] = {}
    rest = text.strip()
    while (match := _OPTIONS.search(rest)) is not None:
        options.setdefault(match[1], match[2])
        rest = rest[: match.start()]
    if rest in PRESETS and not options:
        return PRESETS[rest]
    name = options.pop("name", None)
    if rest.startswith("json:"):
        fields = {"json": rest.removeprefix("json:"), **options}
        name = name or rest.removeprefix("json:").rpartition(".")[2]
    else:
        if "(" not in rest and re.fullmatch(r"[\w-]+", rest):
            raise ValueError(f"{rest!r} is no preset and has no group; {nearest(rest, PRESETS)}")
        fields = {"pattern": rest, **options}
        name = name or _find_unit(rest) or "figure"
    try:
        return {name: msgspec.convert(fields, Figure)}
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        raise ValueError(f"{where.rstrip('`')}: {message}" if where else message) from error


def check_metrics(texts: Iterable[str]) -> None:
    """Refuse a text that `parse_metric` refuses. Raises ValueError: names it."""
    try:
        for text in texts:
            parse_metric(text)
    except ValueError as error:
        raise ValueError(f"metric: {error}") from error


def check_figures(figures: Mapping[str, Figure | str | None]) -> None:
    """Refuse a name that no line can hold, and a text that `parse_metric` refuses.

    Raises ValueError: names the figure.
    """
    for name in figures:
        check_line(name, "figures: name")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"figures: name {name[:20]}... is longer than {_LONGEST_NAME} characters")
    try:
        for text in filter(lambda figure: isinstance(figure, str), figures.values()):
            parse_metric(str(text))
    except ValueError as error:
        raise ValueError(f"figures: {error}") from error


def named_figures(figures: Mapping[str, Figure | str | None]) -> dict[str, Figure | None]:
    """Return ``figures`` of a file without texts: a preset adds its figures, a pattern gets the key's name."""
    resolved: dict[str, Figure | None] = {}
    for name, figure in figures.items():
        if not isinstance(figure, str):
            resolved[name] = figure
        elif figure in PRESETS:
            resolved |= PRESETS[figure]
        else:
            resolved[name] = next(iter(parse_metric(figure).values()))
    return resolved
