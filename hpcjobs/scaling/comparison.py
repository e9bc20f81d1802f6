"""Compares studies and series with each other, and with bounds that a site's acceptance test sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from hpcjobs.errors import RequestError, nearest
from hpcjobs.files import write_beside
from hpcjobs.pages.figures import COLOURS, GREY, add_legend, escape_math, new_figure, style_axes
from hpcjobs.scaling.analysis import Analysis, SizeResult
from hpcjobs.scaling.fits import Interval, Ratio, format_p_value, reaches
from hpcjobs.scaling.page import draw_intervals, interval, name_size
from hpcjobs.scaling.study import Study
from hpcjobs.site.models import Frozen
from hpcjobs.site.yaml_file import read_yaml
from hpcjobs.units import format_number, number_style

_LONGEST_NAME: Final = 24


class Bound(Frozen, frozen=True):
    """Bounds of one size; None: not checked."""

    throughput: float | None = None
    efficiency: float | None = None
    speedup: float | None = None
    tolerance: float = 0.0
    """A figure may be below its bound by this share."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance {self.tolerance:g}: a share from 0 to below 1, such as 0.05")
        for what in ("throughput", "efficiency", "speedup"):
            least = getattr(self, what)
            if least is not None and not least > 0:
                raise ValueError(f"{what} {least:g}: a bound is above 0")
        if self.efficiency is not None and self.efficiency > 1:
            raise ValueError(_above_one("efficiency", self.efficiency))


class Reference(Frozen, frozen=True):
    """``ref.yaml``: bounds by size: ``4`` (nodes, or ranks where the study varies ranks), or ``2x4``."""

    sizes: dict[int | str, Bound]
    unit: str | None = None


class BoundCheck(NamedTuple):
    """One bound, and whether it held."""

    size: str
    what: str
    measured: float | None
    """None: not measured, which holds no bound."""
    bound: float
    at_most: bool = False
    """The bound is the most allowed, not the least."""

    @property
    def held(self) -> bool:
        if self.measured is None:
            return False
        return reaches(self.bound, self.measured) if self.at_most else reaches(self.measured, self.bound)

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else format_number(self.measured)
        return f"{self.name}: {measured}, {'at most' if self.at_most else 'at least'} {format_number(self.bound)}"

    @property
    def name(self) -> str:
        """``efficiency at 4x1``."""
        return f"{self.what} at {self.size}"


def compare(analysis: Analysis, baseline: Analysis) -> list[list[str]]:
    """Rows of text, headers first: throughput and efficiency of both at the sizes they share.

    Raises RequestError: they count different things, or share no size.
    """
    if analysis.unit != baseline.unit or analysis.per != baseline.per:
        raise RequestError(
            f"the studies cannot be compared: {analysis.unit} by {analysis.per}, {baseline.unit} by {baseline.per}"
        )
    shared = match_sizes(analysis, baseline)
    if not shared:
        raise RequestError("the studies share no size")
    efficiency, base = "efficiency", None
    if name_size(analysis.groups[0]) != name_size(baseline.groups[0]):
        base = shared[0]
        efficiency = f"efficiency against {name_size(base[0])}"
    headers = ["nodes x tasks", analysis.unit, "baseline", "ratio", efficiency, "baseline", "significant at 5 %"]
    return [headers, *(_row(*each, base) for each in shared)]


def check_modes(study: Study, baseline: Study) -> None:
    """Refuse to compare a strong study, whose work is constant, with a weak one.

    Raises RequestError: one of each.
    """
    if study.mode != baseline.mode:
        raise RequestError(
            f"the studies cannot be compared: {study.name} is of {study.mode} scaling, {baseline.name} of"
            f" {baseline.mode} scaling",
            hint="on more ranks a strong study does the same work, and a weak one more",
        )


def match_sizes(analysis: Analysis, baseline: Analysis) -> list[tuple[SizeResult, SizeResult, Ratio]]:
    """The sizes that both have, with the throughput ratio of ``analysis`` to ``baseline``."""
    places = {name_size(group): place for place, group in enumerate(baseline.groups)}
    return [
        (group, baseline.groups[place], analysis.by_size.compare(number, baseline.by_size, place))
        for number, group in enumerate(analysis.groups)
        if (place := places.get(name_size(group))) is not None
    ]


def _row(
    group: SizeResult, old: SizeResult, compared: Ratio, base: tuple[SizeResult, SizeResult, Ratio] | None
) -> list[str]:
    """``base``: the size of both to which efficiencies are relative; None: the smallest of each, which is the same."""
    efficiencies = [group.efficiency.value, old.efficiency.value]
    if base is not None:
        efficiencies = [
            size.throughput.value / first.throughput.value * first.n / size.n
            for size, first in zip((group, old), base[:2], strict=True)
        ]
    now, then = group.throughput, old.throughput
    ratio, p_value = compared
    significant = "scatter not known" if p_value is None else "yes" if p_value < 0.05 else "no"
    if p_value is not None:
        significant += f" ({format_p_value(p_value)})"
    return [
        name_size(group), f"{now.value:{number_style(now.value)}}", f"{then.value:{number_style(then.value)}}",
        interval(ratio, ".2f"), *(f"{efficiency:.0%}" for efficiency in efficiencies), significant,
    ]  # fmt: skip


_CONDITION = re.compile(
    r"\s*(\w+)\s*(>=|<=)\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*(?:at\s+(\S+)\s*)?\Z", re.ASCII
)
_SHARES: Final = (
    *("efficiency", "communication", "data_wait", "compute", "checkpoint", "cpu_efficiency", "gpu_utilization"),
)
"""Figures from 0 to 1, which may be written in percent."""
_FIGURES: Final = (*_SHARES, "throughput", "speedup", "step_s", "epoch_s", "queue_wait_s", "energy_j")
"""Figures of a size that a condition may name."""


def _above_one(what: str, value: float) -> str:
    return f"{what} {value:g} is above 1: a share is from 0 to 1; write {value / 100:g} for {value:g} %"


def check(analysis: Analysis, bound: str) -> list[BoundCheck]:
    """Check a condition (``efficiency>=0.9 at 4``; without a size every size), or each bound of a file.

    Raises ConfigError: the file is wrong. RequestError: it names a size that was not measured, another unit or no
    figure.
    """
    condition = _CONDITION.match(bound)
    if condition is None:
        if any(sign in bound for sign in "<>=") and not Path(bound).exists():
            raise RequestError(f"--check {bound!r} is no condition", hint="write 'efficiency>=0.9 at 4', or a file")
        return _check_file(analysis, Path(bound))
    what, relation, number, percent, size = condition.groups()
    if what not in _FIGURES:
        raise RequestError(f"--check {bound!r}: a size has no figure {what!r}", hint=nearest(what, _FIGURES))
    if percent and what not in _SHARES:
        raise RequestError(f"--check {bound!r}: {what} is no share", hint="write its value without %")
    value = float(number) / (100 if percent else 1)
    if what in _SHARES and value > 1:
        raise RequestError(f"--check {bound!r}: {_above_one(what, value)}")
    groups = analysis.groups if size is None else [_find_size(analysis, size, f"--check {bound!r}")]
    return [BoundCheck(name_size(group), what, _value(group, what), value, relation == "<=") for group in groups]


def _value(group: SizeResult, what: str) -> float | None:
    value = getattr(group, what)
    return value.value if isinstance(value, Interval) else value


def _find_size(analysis: Analysis, size: int | str, where: str) -> SizeResult:
    """The group of ``4``, or of ``2x2``."""
    measured = [group for group in analysis.groups if str(size) in (str(group.n), name_size(group))]
    if not measured:
        raise RequestError(f"{where} bounds size {size}, which the study has not measured")
    if len(measured) > 1:
        names = ", ".join(map(name_size, measured))
        raise RequestError(f"{where} bounds {size} {analysis.per}, which are several sizes", hint=f"write {names}")
    return measured[0]


def _check_file(analysis: Analysis, path: Path) -> list[BoundCheck]:
    reference = read_yaml(path, Reference)
    if reference.unit is not None and reference.unit != analysis.unit:
        raise RequestError(f"{path} is about {reference.unit}, the study about {analysis.unit}")
    return [
        BoundCheck(name_size(group), what, _value(group, what), least * (1 - bound.tolerance))
        for size, bound in reference.sizes.items()
        for group in [_find_size(analysis, size, str(path))]
        for what in ("throughput", "efficiency", "speedup")
        if (least := getattr(bound, what)) is not None
    ]


def write_junit(path: Path, study: str, checks: Sequence[BoundCheck]) -> None:
    """Write the checks as JUnit XML, a test case each."""
    failures = sum(not check.held for check in checks)
    suite = Element("testsuite", name=f"hpcjobs report scaling {study}", tests=str(len(checks)), failures=str(failures))
    for check in checks:
        case = SubElement(suite, "testcase", classname=study, name=check.name)
        if not check.held:
            SubElement(case, "failure", message=str(check))
    write_beside(path, tostring(suite, encoding="unicode", xml_declaration=True) + "\n", mode=0o644)


def draw(named: Sequence[tuple[str, Analysis]]) -> Figure:
    """Throughput of several studies or series by size, and below it the ratio of each to the first one."""
    figure, _ = new_figure(height=5.4)
    figure.clear()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    style_axes(above)
    style_axes(below)
    first = named[0][1]
    sizes = sorted({group.n for _, analysis in named for group in analysis.groups})
    for place, (name, analysis) in enumerate(named):
        colour = COLOURS[place % len(COLOURS)]
        points = [(group.n, group.throughput) for group in analysis.groups]
        draw_intervals(above, points, fmt="o-", color=colour, label=escape_math(name))
        if place:
            ratios = [(group.n, compared.ratio) for group, _, compared in match_sizes(analysis, first)]
            draw_intervals(below, ratios, fmt="o-", color=colour)
    above.set_xscale("log", base=2)
    above.set_yscale("log", base=2)
    low, high = above.get_ylim()
    above.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(5))
    above.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    above.yaxis.set_minor_locator(NullLocator())
    above.set_ylabel(escape_math(first.unit))
    below.axhline(1, linestyle=":", color=GREY)
    below.set_xticks(sizes, [str(size) for size in sizes])
    below.minorticks_off()
    below.set_xlabel(first.per)
    first_name = escape_math(named[0][0])
    below.set_ylabel(f"ratio to {first_name if len(first_name) <= _LONGEST_NAME else 'the first'}")
    add_legend(figure)
    return figure
