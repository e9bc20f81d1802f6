"""What a report prints of simulated studies is true as often as it says.

Nine laws, one of which no fitted formula contains, studied with three to five sizes and
two to five repeats. Runs scatter log-normally, equally at all sizes or three times as much at one end as at the other.
The target efficiency lies 0.1 % above the true one of the middle size: there a wrong 'measured up to' is most likely.

Bounds of knee and prediction are over all laws that the runs do not exclude, so they may hold more often than 95 %.

The short test takes 1,296 studies, three of each kind; ``long`` takes 300 of each law, number
of sizes and kind of scatter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import polars as pl
import pytest

from hpcjobs.scaling.analysis import Analysis, analyse
from hpcjobs.scaling.comparison import compare
from hpcjobs.scaling.fits import Interval
from hpcjobs.scaling.runs import _COLUMNS

SIZES, REPEATS = (3, 4, 5), (2, 3, 4, 5)
SCATTER: Final[dict[str, Callable[[float], float]]] = {
    "equal": lambda part: 0.03,
    "rising": lambda part: 0.02 * 3**part,
    "falling": lambda part: 0.02 * 3 ** (1 - part),
    "small": lambda part: 0.003,
}
"""Relative standard deviation of a run, by the place of its size: 0 is the smallest, 1 the largest."""


class Truth(NamedTuple):
    """A law, and the names of the fitted laws that contain it."""

    throughput: Callable[[float], float]
    names: tuple[str, ...]


def inverse(serial: float, kappa: float = 0.0, logarithmic: float = 0.0) -> Callable[[float], float]:
    return lambda n: 1000 * n / (1 + serial * (n - 1) + kappa * n * (n - 1) + logarithmic * n * math.log2(n))


LAWS: Final = {
    "perfect": Truth(lambda n: 1000 * n, ("Amdahl", "USL", "Gustafson", "logarithmic")),
    "Amdahl, 5 %": Truth(inverse(0.05), ("Amdahl", "USL", "logarithmic")),
    "Amdahl, 30 %": Truth(inverse(0.3), ("Amdahl", "USL", "logarithmic")),
    "Gustafson, 10 %": Truth(lambda n: 1000 * (0.1 + 0.9 * n), ("Gustafson",)),
    "Gustafson, 30 %": Truth(lambda n: 1000 * (0.3 + 0.7 * n), ("Gustafson",)),
    "USL": Truth(inverse(0.03, 0.002), ("USL",)),
    "USL that falls": Truth(inverse(0.05, 0.04), ("USL",)),
    "overheads": Truth(inverse(0.02, 0, 0.03), ("logarithmic",)),
    "falls": Truth(lambda n: 1000 / n**0.5, ()),
}


class Design(NamedTuple):
    """How a law is measured."""

    law: str
    sizes: int
    repeats: int
    scatter: str

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(2**k for k in range(self.sizes))

    @property
    def target(self) -> float:
        middle = self.counts[self.sizes // 2]
        return min(0.8, 1.001 * LAWS[self.law].throughput(middle) / middle / 1000)


def table(sizes: Sequence[tuple[int, Callable[[], float]]], repeats: int) -> pl.DataFrame:
    """Runs of each size; its function gives the throughput of the next one."""
    rows = [
        {"nodes": n, "ranks": n, "ntasks_per_node": 1, "repeat": repeat, "job_id": f"{n}_{repeat}", "unit": "x/s",
         "throughput": measure()}
        for n, measure in sizes for repeat in range(repeats)
    ]  # fmt: skip
    return pl.DataFrame([dict.fromkeys(_COLUMNS) | row for row in rows], schema=_COLUMNS, orient="row")


def simulate(design: Design, random: np.random.Generator) -> Analysis:
    def run_of(n: int, sigma: float) -> Callable[[], float]:
        return lambda: LAWS[design.law].throughput(n) * math.exp(random.normal(0, sigma))

    scatter = SCATTER[design.scatter]
    sizes = [(n, run_of(n, scatter(place / (design.sizes - 1)))) for place, n in enumerate(design.counts)]
    return analyse(table(sizes, design.repeats), target=design.target)


@cache
def true_knee(law: str, target: float) -> float:
    """Where the efficiency falls to the target; infinite where it does not."""
    where = np.geomspace(1, 1024, 20_000)
    low = [LAWS[law].throughput(n) / n / 1000 < target for n in where]
    return float(where[low.index(True)]) if any(low) else math.inf


def printed(result: Analysis, design: Design) -> Iterator[tuple[str, Interval, float]]:
    """Kind, interval and true value of everything that a report prints with an interval."""
    truth = LAWS[design.law]
    for group in result.groups:
        yield "mean", group.throughput, truth.throughput(group.n)
        yield "ratio", group.speedup, truth.throughput(group.n) / truth.throughput(1)
    if result.knee.fitted is not None:
        yield "knee", result.knee.fitted, true_knee(design.law, design.target)
    if result.doubling is not None:
        yield "prediction", result.doubling, truth.throughput(2 * result.groups[-1].n)


class Tally(NamedTuple):
    """Of many studies: how often each thing was printed, and how often it was true."""

    printed: Counter[str]
    true: Counter[str]

    def add(self, kind: str, *, true: bool) -> None:
        self.printed[kind] += 1
        self.true[kind] += true

    def share(self, kind: str) -> float:
        return self.true[kind] / self.printed[kind]


def simulate_all(designs: Iterable[Design], *, seed: int) -> Tally:
    tally, random = Tally(Counter(), Counter()), np.random.default_rng(seed)
    for design in designs:
        result, truth = simulate(design, random), LAWS[design.law]
        for kind, (_, low, high), value in printed(result, design):
            if low is not None:
                held = low <= value * (1 + 1e-9) and (high is None or value <= high * (1 + 1e-9))
                tally.add(kind, true=held)
        reached = result.knee.measured or 1
        efficient = truth.throughput(reached) / reached >= 1000 * design.target
        tally.add("measured up to", true=reached == 1 or efficient)
        tally.add("law", true=result.chosen is None or result.chosen.law.name in truth.names)
    return tally


def assert_true(tally: Tally, studies: int) -> None:
    """Shares of studies, less what chance does to so few."""
    chance = 3 * math.sqrt(0.95 * 0.05 / studies)
    shares = {kind: round(tally.share(kind), 3) for kind in tally.printed}
    for kind in ("mean", "ratio"):
        assert 0.93 - chance <= shares[kind] <= 0.97 + chance, shares
    for kind in ("knee", "prediction", "measured up to"):
        assert shares[kind] >= 0.93 - chance, shares
        assert tally.printed[kind] > studies / 2, "an interval that is never printed holds nothing"
    assert shares["law"] >= 0.95 - chance, shares


def test_what_a_report_prints_of_simulated_studies_is_true() -> None:
    designs = [Design(*parts) for parts in product(LAWS, SIZES, REPEATS, SCATTER)] * 3
    assert_true(simulate_all(designs, seed=5), len(designs))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("law", LAWS)
def test_300_studies_of_each_kind_are_reported_truly(law: str) -> None:
    """Each law alone: an interval that is right on average must not be wrong for one of them."""
    designs = [
        Design(law, sizes, REPEATS[number % len(REPEATS)], scatter)
        for sizes, scatter, number in product(SIZES, SCATTER, range(300))
    ]
    tally = simulate_all(designs, seed=700 + list(LAWS).index(law))
    shares = {kind: round(tally.share(kind), 3) for kind in tally.printed}
    print(law, shares)
    kinds = shares if LAWS[law].names else ("mean", "ratio", "measured up to", "law")  # else no formula has its shape
    assert all(shares[kind] >= 0.93 for kind in kinds), shares
    assert all(shares[kind] <= 0.97 for kind in ("mean", "ratio")), shares


def false_alarms(repeats: int, studies: int) -> float:
    """The share of comparisons of a study with its like that are called significant."""
    random = np.random.default_rng(3)
    flat = [(1, lambda: 1000 * math.exp(random.normal(0, 0.05)))]
    verdicts = [compare(analyse(table(flat, repeats)), analyse(table(flat, repeats)))[1][-1] for _ in range(studies)]
    return sum(verdict.startswith("yes") for verdict in verdicts) / studies


@pytest.mark.parametrize("repeats", [2, 3])
def test_equal_studies_are_seldom_called_different(repeats: int) -> None:
    assert false_alarms(repeats, 300) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.long
@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
def test_equal_studies_are_called_different_in_five_of_a_hundred_at_most(repeats: int) -> None:
    assert false_alarms(repeats, 2000) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
