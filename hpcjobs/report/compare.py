"""A study against another one, and against bounds that a site's acceptance test sets."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.report.scaling import Analysis, Group
from hpcjobs.report.told import rate_style
from hpcjobs.site.models import Frozen
from hpcjobs.site.yaml_file import read_yaml


class Bound(Frozen, frozen=True):
    """What one size must reach; None: not checked."""

    throughput: float | None = None
    efficiency: float | None = None
    speedup: float | None = None
    tolerance: float = 0.0
    """Share by which a figure may be below its bound."""


class Reference(Frozen, frozen=True):
    """``ref.yaml``: bounds by N (nodes, or ranks where the study varies ranks)."""

    sizes: dict[int, Bound]
    unit: str | None = None


class Verdict(NamedTuple):
    """One bound, and whether it held."""

    n: int
    what: str
    measured: float
    least: float

    @property
    def held(self) -> bool:
        return self.measured >= self.least


def compare(found: Analysis, baseline: Analysis) -> list[list[str]]:
    """Rows of text, headers first: throughput and efficiency of both at the sizes they share.

    Raises:
        RequestError: they count different things, or share no size.
    """
    if found.unit != baseline.unit or found.per != baseline.per:
        raise RequestError(
            f"the studies cannot be compared: {found.unit} by {found.per}, {baseline.unit} by {baseline.per}"
        )
    before = {group.n: group for group in baseline.groups}
    shared = [(group, before[group.n]) for group in found.groups if group.n in before]
    if not shared:
        raise RequestError("the studies share no size")
    headers = [found.per, found.unit, "baseline", "ratio", "efficiency", "baseline", "told apart"]
    return [headers, *(_row(group, old) for group, old in shared)]


def _row(group: Group, old: Group) -> list[str]:
    now, then = group.throughput, old.throughput
    apart = "yes" if now.low > then.high or now.high < then.low else "no" if now.low == now.low else "single runs"
    return [
        str(group.n), f"{now.value:{rate_style(now.value)}}", f"{then.value:{rate_style(then.value)}}",
        f"{now.value / then.value:.2f}",
        f"{group.efficiency.value:.0%}", f"{old.efficiency.value:.0%}", apart,
    ]  # fmt: skip


def check(found: Analysis, path: Path) -> list[Verdict]:
    """Every bound of the file against the study.

    Raises:
        ConfigError: the file is wrong. RequestError: it bounds a size that was not measured, or another unit.
    """
    reference = read_yaml(path, Reference)
    if reference.unit is not None and reference.unit != found.unit:
        raise RequestError(f"{path} is about {reference.unit}, the study about {found.unit}")
    measured = {group.n: group for group in found.groups}
    verdicts = []
    for n, bound in reference.sizes.items():
        if n not in measured:
            raise RequestError(f"{path} bounds {n} {found.per}, which the study has not measured")
        for what in ("throughput", "efficiency", "speedup"):
            least = getattr(bound, what)
            if least is not None:
                value = getattr(measured[n], what).value
                verdicts.append(Verdict(n, what, value, least * (1 - bound.tolerance)))
    return verdicts
