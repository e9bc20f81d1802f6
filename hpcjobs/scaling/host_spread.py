"""Compares each run with the median of its size, one row per host: a slow host stands out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import polars as pl
from matplotlib.figure import Figure

from hpcjobs.pages.figures import escape_math, new_figure
from hpcjobs.runtime.hostlist import hosts_of

_SLOW: Final = 0.95
"""A host is marked when its fastest run is slower than this share of what the median host's fastest run reached."""
_MOST_HOSTS: Final = 48
_UNKNOWN: Final = "not known"
_COLOURS: Final = {False: "#6b4fa0", True: "#c2571a"}


class HostRuns(NamedTuple):
    """The runs that used a host: throughput over the median of their size."""

    host: str
    relative: tuple[float, ...]
    slow: bool


def host_spread(runs: pl.DataFrame, *, per: str) -> list[HostRuns]:
    """The hosts of a study, slowest first.

    A run is as slow as its slowest host. So a host is judged by its fastest run: a healthy one has been in some run
    without the slow one.
    """
    sound = runs.filter(pl.col("throughput").is_finite() & (pl.col("throughput") > 0)).with_columns(
        relative=pl.col("throughput") / pl.col("throughput").median().over(per, "nodes")
    )
    of_host: dict[str, list[float]] = {}
    for node_list, relative in sound.select("node_list", "relative").rows():
        for host in hosts_of(node_list) if node_list else [_UNKNOWN]:
            of_host.setdefault(host, []).append(relative)
    fastest = pl.Series([max(values) for values in of_host.values()], dtype=pl.Float64).median()
    bound = _SLOW * fastest if isinstance(fastest, float) else 0.0
    spread = [HostRuns(host, tuple(values), max(values) < bound) for host, values in of_host.items()]
    return sorted(spread, key=lambda one: (max(one.relative), _by_number(one.host)))


def _by_number(host: str) -> list[tuple[int, str]]:
    """A key by which ``n2`` comes before ``n10``."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", host)]


def draw_hosts(hosts: Sequence[HostRuns]) -> Figure:
    """One row per host, the slowest at the top; of many hosts the slowest."""
    shown = hosts[:_MOST_HOSTS]
    figure, axes = new_figure(height=max(2.4, 1.2 + 0.2 * len(shown)))
    for row, one in enumerate(shown):
        axes.plot(one.relative, [row] * len(one.relative), "o", color=_COLOURS[one.slow], alpha=0.7)
    axes.axvline(1, linestyle=":", color="#8a8f98")
    names = [escape_math(one.host) + (" (slow)" if one.slow else "") for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    for label, one in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_color(_COLOURS[True] if one.slow else "black")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    few = f" (slowest {len(shown)} of {len(hosts)} hosts)" if len(shown) < len(hosts) else ""
    axes.set_xlabel(f"throughput of a run / median of its size{few}")
    return figure
