"""Compares a study with another one, and with bounds that a site's acceptance test sets."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.scaling.analysis import Analysis, SizeResult
from hpcjobs.scaling.fits import Ratio, RunGroups, format_p_value
from hpcjobs.scaling.page import interval
from hpcjobs.site.models import Frozen
from hpcjobs.site.yaml_file import read_yaml
from hpcjobs.units import number_style


class Bound(Frozen, frozen=True):
    """Bounds of one size; None: not checked."""

    throughput: float | None = None
    efficiency: float | None = None
    speedup: float | None = None
    tolerance: float = 0.0
    """A figure may be below its bound by this share."""


class Reference(Frozen, frozen=True):
    """``ref.yaml``: bounds by size: ``4`` (nodes, or ranks where the study varies ranks), or ``2x4``."""

    sizes: dict[int | str, Bound]
    unit: str | None = None


class BoundCheck(NamedTuple):
    """One bound, and whether it held."""

    size: str
    what: str
    measured: float
    least: float

    @property
    def held(self) -> bool:
        return self.measured >= self.least


def compare(analysis: Analysis, baseline: Analysis) -> list[list[str]]:
    """Rows of text, headers first: throughput and efficiency of both at the sizes they share.

    Raises:
        RequestError: they count different things, or share no size.
    """
    if analysis.unit != baseline.unit or analysis.per != baseline.per:
        raise RequestError(
            f"the studies cannot be compared: {analysis.unit} by {analysis.per}, {baseline.unit} by {baseline.per}"
        )
    shared = _match_sizes(analysis, baseline)
    if not shared:
        raise RequestError("the studies share no size")
    headers = ["nodes x tasks", analysis.unit, "baseline", "ratio", "efficiency", "baseline", "significant at 5 %"]
    return [headers, *(_row(*each) for each in shared)]


def _match_sizes(analysis: Analysis, baseline: Analysis) -> list[tuple[SizeResult, SizeResult, Ratio]]:
    """The sizes that both have, with the ratio of the first one's throughput to that of ``baseline``."""
    now, then = (RunGroups([group.measured for group in each.groups]) for each in (analysis, baseline))
    places = {name_size(group): place for place, group in enumerate(baseline.groups)}
    return [
        (group, baseline.groups[place], now.compare(number, then, place))
        for number, group in enumerate(analysis.groups)
        if (place := places.get(name_size(group))) is not None
    ]


def name_size(group: SizeResult) -> str:
    """``2x4``: nodes, and tasks on each."""
    return f"{group.nodes}x{group.ranks // group.nodes}"


def _row(group: SizeResult, old: SizeResult, compared: Ratio) -> list[str]:
    now, then = group.throughput, old.throughput
    ratio, p_value = compared
    significant = "single runs" if p_value is None else "yes" if p_value < 0.05 else "no"
    if p_value is not None:
        significant += f" ({format_p_value(p_value)})"
    return [
        name_size(group), f"{now.value:{number_style(now.value)}}", f"{then.value:{number_style(then.value)}}",
        interval(ratio, ".2f"), f"{group.efficiency.value:.0%}", f"{old.efficiency.value:.0%}", significant,
    ]  # fmt: skip


def check(analysis: Analysis, path: Path) -> list[BoundCheck]:
    """Every bound of the file against the study.

    Raises:
        ConfigError: the file is wrong. RequestError: it bounds a size that was not measured, or another unit.
    """
    reference = read_yaml(path, Reference)
    if reference.unit is not None and reference.unit != analysis.unit:
        raise RequestError(f"{path} is about {reference.unit}, the study about {analysis.unit}")
    verdicts = []
    for size, bound in reference.sizes.items():
        measured = [group for group in analysis.groups if size in (group.n, name_size(group))]
        if not measured:
            raise RequestError(f"{path} bounds size {size}, which the study has not measured")
        if len(measured) > 1:
            names = ", ".join(map(name_size, measured))
            raise RequestError(f"{path} bounds {size} {analysis.per}, which are several sizes", hint=f"write {names}")
        for what in ("throughput", "efficiency", "speedup"):
            least = getattr(bound, what)
            if least is not None:
                value = getattr(measured[0], what).value
                verdicts.append(BoundCheck(name_size(measured[0]), what, value, least * (1 - bound.tolerance)))
    return verdicts
