"""Fits give back what made the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcjobs.scaling.fits import AMDAHL, GUSTAFSON, USL, Interval, Law, RunGroups, fit, reaches

NODES = [n for n in (1, 2, 4, 8, 16) for _ in range(3)]


def usl(n: float) -> float:
    return 1000 * n / (1 + 0.03 * (n - 1) + 0.002 * n * (n - 1))


@pytest.mark.parametrize(
    ("law", "curve", "truth"),
    [
        (AMDAHL, lambda n: 1000 / (0.05 + 0.95 / n), {"serial": 0.05}),
        (GUSTAFSON, lambda n: 1000 * (0.10 + 0.90 * n), {"serial": 0.10}),
        (USL, usl, {"sigma": 0.03, "kappa": 0.002}),
    ],
    ids=["Amdahl", "Gustafson", "USL"],
)
def test_exact_data_give_exact_parameters(law: Law, curve: Callable[[float], float], truth: dict[str, float]) -> None:
    fitted = fit(law, NODES, [curve(n) for n in NODES])
    assert fitted is not None
    assert fitted.parameters == pytest.approx({"X(1)": 1000, **truth}, rel=1e-6)
    assert fitted.at(32).value == pytest.approx(curve(32))
    assert fitted.rms < 1e-9


def test_too_few_node_counts_give_no_fit() -> None:
    assert fit(USL, [1, 1, 2, 2], [1, 1, 2, 2]) is None
    assert fit(AMDAHL, [4, 4, 4], [1, 1, 1]) is None


def test_sizes_with_a_single_run_give_no_interval() -> None:
    curve = fit(AMDAHL, [1, 2], [100, 190])
    assert curve is not None
    assert curve.parameters["serial"] == pytest.approx(0.0526, abs=1e-3)
    assert curve.at(4).low is None


def test_better_than_linear_is_no_negative_fraction() -> None:
    curve = fit(AMDAHL, [1, 2, 4], [100, 210, 430])
    assert curve is not None
    assert curve.parameters["serial"] == 0


def test_a_curve_that_falls_is_for_usl() -> None:
    """Amdahl's law never falls; its residuals show it."""
    n = [1, 2, 4, 8, 16, 32]
    x = [1000 * k / (1 + 0.05 * (k - 1) + 0.01 * k * (k - 1)) for k in n]
    usl, amdahl = fit(USL, n, x), fit(AMDAHL, n, x)
    assert usl is not None
    assert amdahl is not None
    assert usl.rms < 0.001 < amdahl.rms


def test_predictions_have_intervals() -> None:
    noisy = [1000 / (0.05 + 0.95 / n) * (1 + 0.02 * (-1) ** i) for i, n in enumerate(NODES)]
    curve = fit(AMDAHL, NODES, noisy)
    assert curve is not None
    ahead = curve.at(32)
    assert ahead.low is not None
    assert ahead.high is not None
    assert ahead.low < 1000 / (0.05 + 0.95 / 32) < ahead.high


@pytest.mark.parametrize("serial", [0.0, 1.0])
def test_a_prediction_holds_the_truth_where_a_parameter_is_at_its_bound(serial: float) -> None:
    noisy = [1000 / (serial + (1 - serial) / n) * (1 + 0.02 * (-1) ** i) for i, n in enumerate(NODES)]
    fitted = fit(AMDAHL, NODES, noisy)
    assert fitted is not None
    assert 0 <= fitted.parameters["serial"] <= 1
    value, low, high = fitted.at(32)
    assert low is not None
    assert high is not None
    assert low <= value <= high
    assert low <= 1000 / (serial + (1 - serial) / 32) * (1 + 1e-3)


def test_misfit_is_told_apart_from_scatter() -> None:
    """Amdahl's law cannot fall, however much the runs scatter."""
    scatter = [1.02, 1.0, 0.98] * 5
    falls = fit(AMDAHL, NODES, [usl(n**1.5) * s for n, s in zip(NODES, scatter, strict=True)])
    holds = fit(AMDAHL, NODES, [1000 / (0.05 + 0.95 / n) * s for n, s in zip(NODES, scatter, strict=True)])
    assert falls is not None
    assert holds is not None
    assert falls.lack is not None
    assert holds.lack is not None
    assert falls.lack.scatter == pytest.approx(holds.lack.scatter)
    assert holds.lack.scatter == pytest.approx(0.02, rel=0.01)
    assert falls.lack.p_value is not None
    assert holds.lack.p_value is not None
    assert falls.lack.p_value < 1e-4
    assert holds.lack.p_value > 0.5


def test_repeats_that_are_all_alike_on_one_side_are_compared_without_a_warning() -> None:
    ratio, p_value = RunGroups([[50.0, 51.0, 52.0]]).compare(0, RunGroups([[100.0, 100.0, 100.0]]), 0)
    assert ratio.value == pytest.approx(0.51, abs=1e-3)
    assert 0.47 < (ratio.low or 0) < (ratio.high or 1) < 0.55
    assert p_value is not None
    assert p_value < 0.01


def test_two_runs_of_a_size_have_the_scatter_of_all_sizes_behind_them() -> None:
    """Two runs alone gave 2,132 to 533,408: Student's t of one degree of freedom is 12.7."""
    low, high = RunGroups([[33_000, 34_400], [30_000, 38_000], [21_000, 22_500], [52_000, 54_000]]).mean(1)[1:]
    assert low is not None
    assert high is not None
    assert 15_000 < low < 30_000 < 38_000 < high < 75_000


def test_a_size_with_one_run_has_no_interval_where_others_are_repeated() -> None:
    """The scatter of the others was taken for its own, and 72 of 100 intervals held."""
    groups = RunGroups([[100.0, 101.0, 99.0], [190.0]])
    assert groups.mean(0).low is not None
    assert (groups.mean(1), groups.ratio(1, 0).low) == (Interval(190.0), None)
    assert groups.compare(1, groups, 0).p_value is None


def test_equal_runs_and_their_ratio_have_their_exact_value() -> None:
    """The mean of 5, 5 and 5 was 4.999999999999999, and missed a bound of 5."""
    groups = RunGroups([[5.0] * 3, [8.0] * 3, [0.1] * 7])
    assert [groups.mean(n).value for n in range(3)] == [5.0, 8.0, 0.1]
    assert groups.ratio(1, 0).value == 1.6
    assert reaches(0.8 - 1e-12, 0.8)
    assert not reaches(0.799999, 0.8)


def test_a_parameter_has_the_interval_of_the_values_that_it_may_have() -> None:
    noisy = [1000 / (0.05 + 0.95 / n) * (1 + 0.02 * (-1) ** i) for i, n in enumerate(NODES)]
    fitted = fit(AMDAHL, NODES, noisy)
    assert fitted is not None
    for name, truth in (("serial", 0.05), ("X(1)", 1000)):
        value, low, high = fitted.intervals[name]
        assert value == fitted.parameters[name]
        assert low is not None
        assert high is not None
        assert low < truth < high
        assert high - low < truth
