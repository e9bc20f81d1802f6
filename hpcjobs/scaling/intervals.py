"""Means and ratios of repeated runs, with 95 % intervals and a test of their difference.

Throughput varies by factors, so all of it is computed on logarithms: the mean is the geometric one (the median of
log-normal runs), its interval is Student's t, and two sizes or studies are compared by Welch's t test: larger sizes
often scatter more. The fits of laws allow for that too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE: Final = 0.95


class Interval(NamedTuple):
    """An estimate and its 95 % interval; ``low`` and ``high`` are None where nothing tells how far off it is."""

    value: float
    low: float | None = None
    high: float | None = None

    def scale_by(self, factor: float) -> Interval:
        """The same estimate in another unit."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Interval(self.value * factor, low, high)


class Ratio(NamedTuple):
    """How many times as large one mean is as another."""

    ratio: Interval
    p_value: float | None
    """Of the t test that the means are equal; None: a side has a single run."""


def geometric_mean(values: Sequence[float]) -> Interval:
    """The geometric mean of positive values; without an interval for a single value."""
    logs = np.log(np.asarray(values, float))
    mean = float(logs.mean())
    if len(logs) < 2:
        return Interval(float(np.exp(mean)))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return _interval(mean, mean - reach, mean + reach)


def mean_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio of two geometric means; interval and p-value are of the same test, so they never disagree."""
    logs, base_logs = np.log(np.asarray(values, float)), np.log(np.asarray(base, float))
    difference = float(logs.mean() - base_logs.mean())
    if len(logs) < 2 or len(base_logs) < 2:
        return Ratio(Interval(float(np.exp(difference))), None)
    if np.ptp(logs) == 0 and np.ptp(base_logs) == 0:  # times in whole seconds: all alike
        return Ratio(_interval(difference, difference, difference), 1.0 if difference == 0 else 0.0)
    with warnings.catch_warnings():
        # Repeats that are all alike on one side are no loss of precision: their variance is 0.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        test = stats.ttest_ind(logs, base_logs, equal_var=False)
    bounds = test.confidence_interval(CONFIDENCE)
    return Ratio(_interval(difference, float(bounds.low), float(bounds.high)), float(test.pvalue))


def _interval(*logs: float) -> Interval:
    return Interval(*(float(np.exp(value)) for value in logs))
