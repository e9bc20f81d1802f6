"""Every interval that a report prints holds the truth in 95 of 100 studies, in simulation.

Runs scatter log-normally by 5 %. The truths are a strong study by Amdahl's law and one by the USL, and a weak one by
Gustafson's. An interval that is not printed does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest

from hpcjobs.scaling.analysis import Analysis, analyse
from hpcjobs.scaling.comparison import compare
from hpcjobs.scaling.intervals import Interval
from hpcjobs.scaling.runs import _COLUMNS

NOISE = 0.05
FEW, MANY = 150, 2000
ALLOWED = 0.02
"""Coverage from 93 to 97 %."""


class Truth(NamedTuple):
    """A study that is simulated."""

    mode: str
    sizes: tuple[int, ...]
    target: float
    throughput: Callable[[float], float]
    parameters: dict[str, float]


TRUTHS = {
    "amdahl": Truth("strong", (1, 2, 4), 0.8, lambda n: 1000 / (0.05 + 0.95 / n), {"serial": 0.05}),
    "usl": Truth(
        "strong", (1, 2, 4, 8, 16), 0.8,
        lambda n: 1000 * n / (1 + 0.03 * (n - 1) + 0.002 * n * (n - 1)), {"sigma": 0.03, "kappa": 0.002},
    ),
    "gustafson": Truth("weak", (1, 2, 4, 8, 16, 32), 0.74, lambda n: 1000 * (0.3 + 0.7 * n), {"serial": 0.3}),
}  # fmt: skip


def simulated(truth: Truth, repeats: int, random: np.random.Generator) -> Analysis:
    rows = [
        {"nodes": n, "ranks": n, "ntasks_per_node": 1, "repeat": repeat, "job_id": f"{n}_{repeat}", "unit": "x/s",
         "throughput": truth.throughput(n) * math.exp(random.normal(0, NOISE))}
        for n in truth.sizes for repeat in range(repeats)
    ]  # fmt: skip
    runs = pl.DataFrame([dict.fromkeys(_COLUMNS) | row for row in rows], schema=_COLUMNS, orient="row")
    return analyse(runs, mode=truth.mode, target=truth.target)


def knee_of(truth: Truth) -> float:
    base = truth.sizes[0]
    where = np.geomspace(base, 64 * truth.sizes[-1], 100_000)
    efficient = [truth.throughput(n) / n >= truth.target * truth.throughput(base) / base for n in where]
    return float(where[efficient.index(False)])


def printed(result: Analysis, truth: Truth, knee: float) -> Iterator[tuple[str, Interval, float]]:
    """Kind, interval and true value of everything that a report prints with an interval."""
    x = truth.throughput
    for group in result.groups:
        yield "mean", group.throughput, x(group.n)
        yield "ratio", group.speedup, x(group.n) / x(result.groups[0].n)
    if result.chosen is not None:
        yield "X(1)", result.chosen.x1, x(1)
        for name, interval in result.chosen.parameters.items():
            yield name, interval, truth.parameters.get(name, math.nan)
    if result.knee.fitted is not None:
        yield "knee", result.knee.fitted, knee
    if result.doubling is not None:
        yield "prediction", result.doubling, x(2 * result.groups[-1].n)


def coverage(truth: Truth, repeats: int, studies: int) -> dict[str, tuple[int, float]]:
    """Kind of interval -> how many were printed, and the share of them that held the truth."""
    count, held = Counter[str](), Counter[str]()
    random, knee = np.random.default_rng(7), knee_of(truth)
    for _ in range(studies):
        for kind, (_, low, high), value in printed(simulated(truth, repeats, random), truth, knee):
            if low is not None:
                count[kind] += 1
                held[kind] += low <= value <= (math.inf if high is None else high)
    return {kind: (count[kind], held[kind] / count[kind]) for kind in count}


def assert_covered(truth: Truth, repeats: int, studies: int) -> None:
    result = coverage(truth, repeats, studies)
    assert {"mean", "ratio", "X(1)", "knee", "prediction", *truth.parameters} <= set(result)
    for kind, (count, share) in result.items():
        if kind in {"sigma", "kappa", "serial"} - set(truth.parameters):
            assert count < 0.1 * studies, f"{kind}: the wrong law was chosen in {count} of {studies} studies"
            continue
        chance = 3 * math.sqrt(0.95 * 0.05 / studies) if studies < MANY else 0.0
        assert 0.95 - ALLOWED - chance <= share <= 0.95 + ALLOWED + chance, (kind, repeats, result)


@pytest.mark.parametrize("name", TRUTHS)
def test_intervals_hold_the_truth_in_95_of_100_studies(name: str) -> None:
    """Three repeats, fewer studies than below: an interval that holds the truth half of the time is found out."""
    assert_covered(TRUTHS[name], 3, FEW)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("repeats", [3, 5, 10])
@pytest.mark.parametrize("name", TRUTHS)
def test_intervals_of_2000_studies_hold_the_truth_in_93_to_97_percent(name: str, repeats: int) -> None:
    assert_covered(TRUTHS[name], repeats, MANY)


def false_alarms(repeats: int, studies: int) -> float:
    """The share of comparisons of a study with its like that are called significant."""
    flat = Truth("strong", (1,), 0.8, lambda n: 1000.0, {})
    random = np.random.default_rng(3)
    verdicts = [
        compare(simulated(flat, repeats, random), simulated(flat, repeats, random))[1][-1] for _ in range(studies)
    ]
    return sum(verdict.startswith("yes") for verdict in verdicts) / studies


@pytest.mark.parametrize("repeats", [2, 3])
def test_equal_studies_are_seldom_called_different(repeats: int) -> None:
    assert false_alarms(repeats, 300) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.long
@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
def test_equal_studies_are_called_different_in_five_of_a_hundred_at_most(repeats: int) -> None:
    assert false_alarms(repeats, MANY) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / MANY)
