"""Fits give back what made the data, and say how sure they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcjobs.report.fits import AMDAHL, GUSTAFSON, USL, Law, fit, median_interval

SEEDS = 500
NODES = [n for n in (1, 2, 4, 8, 16) for _ in range(3)]
TRUTH = {
    "Amdahl": (AMDAHL, [1000.0, 0.05]),
    "Gustafson": (GUSTAFSON, [1000.0, 0.10]),
    "USL": (USL, [1000.0, 0.03, 0.002]),
}


@pytest.mark.parametrize("law", TRUTH)
def test_intervals_hold_the_truth_19_times_of_20(law: str) -> None:
    """3 % noise, five node counts, three repeats, 500 seeds: no less often, and not by being too wide."""
    shape, truth = TRUTH[law]
    exact = shape.predict(np.array(NODES, float), np.array([truth]))[0]
    held = np.zeros(len(truth))
    for seed in range(SEEDS):
        noise = np.random.default_rng(seed).normal(1, 0.03, len(exact))
        found = fit(shape, NODES, list(exact * noise), samples=300, seed=seed)
        assert found is not None
        intervals = [found.x1, *found.parameters.values()]
        held += [i.low <= t <= i.high for i, t in zip(intervals, truth, strict=True)]
    coverage = held / SEEDS
    assert (coverage >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / SEEDS)).all(), coverage
    assert (coverage < 0.995).all(), f"intervals too wide to say anything: {coverage}"


@pytest.mark.parametrize("law", TRUTH)
def test_exact_data_give_exact_parameters(law: str) -> None:
    shape, truth = TRUTH[law]
    exact = shape.predict(np.array(NODES, float), np.array([truth]))[0]
    found = fit(shape, NODES, list(exact))
    assert found is not None
    assert [found.x1.value, *(p.value for p in found.parameters.values())] == pytest.approx(truth, rel=1e-6)
    assert found.rms < 1e-9


def test_too_few_node_counts_give_no_fit() -> None:
    assert fit(USL, [1, 1, 2, 2], [1, 1, 2, 2]) is None
    assert fit(AMDAHL, [4, 4, 4], [1, 1, 1]) is None


def test_as_many_points_as_parameters_give_no_interval() -> None:
    found = fit(AMDAHL, [1, 2], [100, 190])
    assert found is not None
    assert found.parameters["serial"].value == pytest.approx(0.0526, abs=1e-3)
    assert math.isnan(found.parameters["serial"].low)


def test_better_than_linear_is_no_negative_fraction() -> None:
    found = fit(AMDAHL, [1, 2, 4], [100, 210, 430])
    assert found is not None
    assert found.parameters["serial"].value == 0


def test_a_curve_that_falls_is_for_usl() -> None:
    """Amdahl's law never falls; its residuals show it."""
    n = [1, 2, 4, 8, 16, 32]
    x = [1000 * k / (1 + 0.05 * (k - 1) + 0.01 * k * (k - 1)) for k in n]
    usl, amdahl = fit(USL, n, x), fit(AMDAHL, n, x)
    assert usl is not None
    assert amdahl is not None
    assert usl.rms < 0.001 < amdahl.rms


def test_predictions_have_intervals() -> None:
    law: Law = AMDAHL
    noisy = [1000 / (0.05 + 0.95 / n) * (1 + 0.02 * (-1) ** i) for i, n in enumerate(NODES)]
    found = fit(law, NODES, noisy)
    assert found is not None
    ahead = found.at(32)
    assert ahead.low < 1000 / (0.05 + 0.95 / 32) < ahead.high


def test_one_run_has_no_spread() -> None:
    alone = median_interval([5.0])
    assert alone.value == 5
    assert math.isnan(alone.low)
    assert median_interval([1, 2, 3]).value == 2
