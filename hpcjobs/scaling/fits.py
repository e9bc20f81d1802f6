"""Means and ratios of repeated runs, scaling laws fitted to throughput, and the choice of a law, with 95 % intervals.

Throughput varies by factors, so statistics are computed on logarithms: the mean is the geometric one (the median of
log-normal runs), its interval is Student's t. Two sizes or studies are compared by the t test of Welch, because larger
sizes often scatter more.

X(N) is throughput on N units (nodes, or ranks on one node). With X1 = X(1):

- Amdahl (1967), strong scaling:   X = X1 / (s + (1 - s)/N),              s: serial fraction
- Gustafson (1988), weak scaling:  X = X1 (s + (1 - s) N),                s: serial fraction of the scaled run
- USL (Gunther, 1993):             X = X1 N / (1 + sigma (N-1) + kappa N (N-1)), contention and crosstalk
- logarithmic overhead:            X = X1 N / (1 + serial (N-1) + log N log2 N), as of messages along a tree

Each law is a sum of coefficients times functions of N, for X or for 1/X. The coefficients, none below 0, have the
least squares of log(measured / fitted). Near the solution that is a linear regression: the coefficients are weighted
sums of the means of the sizes. Their covariance comes from the scatter of the runs of each size, which may differ,
with the degrees of freedom of Welch (1947) and Satterthwaite (1946). A prediction has an interval of Student's t. The
interval of the knee contains every N at which the efficiency may be the target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

CONFIDENCE: Final = 0.95


class Interval(NamedTuple):
    """An estimate and its 95 % interval; ``low`` and ``high`` are None if the error is unknown."""

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
    """p-value of the t test that the means are equal; None: a side has a single run."""


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
        # Equal repeats on one side have a variance of 0: this is not a loss of precision.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        test = stats.ttest_ind(logs, base_logs, equal_var=False)
    bounds = test.confidence_interval(CONFIDENCE)
    return Ratio(_interval(difference, float(bounds.low), float(bounds.high)), float(test.pvalue))


def _interval(*logs: float) -> Interval:
    return Interval(*(float(np.exp(value)) for value in logs))


Floats = npt.NDArray[np.float64]
_SCATTER_OF_NOTHING: Final = 1e-9
"""Relative scatter below which repeats count as equal."""


class Law(NamedTuple):
    """A scaling law: a sum of functions of N, with its parameters as ratios of sums of coefficients."""

    name: str
    basis: Callable[[Floats], Floats]
    """N -> one row per N; its product with the coefficients is X (1/X if ``inverse``)."""
    inverse: bool
    parameters: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
    """Name -> weights of the coefficients above and below the fraction bar."""


def _columns(*columns: Floats) -> Floats:
    return np.stack(columns, axis=-1)


AMDAHL: Final = Law(
    "Amdahl",
    lambda n: _columns(np.ones_like(n), 1 / n),
    inverse=True,
    parameters={"serial": ((1, 0), (1, 1))},
)
GUSTAFSON: Final = Law(
    "Gustafson",
    lambda n: _columns(np.ones_like(n), n),
    inverse=False,
    parameters={"serial": ((1, 0), (1, 1))},
)
USL: Final = Law(
    "USL",
    lambda n: _columns(1 / n, (n - 1) / n, n - 1),
    inverse=True,
    parameters={"sigma": ((0, 1, 0), (1, 0, 0)), "kappa": ((0, 0, 1), (1, 0, 0))},
)
LOGARITHMIC: Final = Law(
    "logarithmic",
    lambda n: _columns(1 / n, (n - 1) / n, np.log2(n)),
    inverse=True,
    parameters={"serial": ((0, 1, 0), (1, 0, 0)), "log": ((0, 0, 1), (1, 0, 0))},
)
LAWS: Final = (AMDAHL, GUSTAFSON, USL, LOGARITHMIC)
"""Amdahl's law is the USL without crosstalk, and the logarithmic law without its overhead."""


class LackOfFit(NamedTuple):
    """Whether the law misses the sizes' means by more than the runs' scatter explains."""

    scatter: float
    """Relative standard deviation of runs of one size."""
    misfit: float
    """Root mean square of the law's relative distance from the sizes' means."""
    p_value: float | None
    """p-value of the F test for lack of fit; None: the law has as many coefficients above 0 as the study has sizes."""


class Fit(NamedTuple):
    """A law fitted to points."""

    law: Law
    coefficients: Floats
    linear: Floats
    """The coefficients of the linear regression around the solution: they differ where one of them is kept at 0."""
    means: Floats
    """The share of each size's mean in ``linear``: one column per size."""
    variances: Floats | None
    """Of those means; None: a size has a single run."""
    free: Floats
    """Degrees of freedom of the variances."""
    residuals: tuple[float, ...]
    """log(measured / fitted), point by point."""
    lack: LackOfFit | None
    """None: no size has two runs."""

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    @property
    def parameters(self) -> dict[str, float]:
        """X(1) and the law's parameters by name, each at 0 or above, without intervals: the same runs chose the law,
        and parameters of a law that does not hold have no true value."""
        ratios = {
            name: float(np.asarray(above) @ self.coefficients) / float(np.asarray(below) @ self.coefficients)
            for name, (above, below) in self.law.parameters.items()
        }
        return {"X(1)": self.at(1).value, **ratios}

    def speedup(self, n: float, base: float) -> float:
        """X(n) / X(base)."""
        there, here = self.law.basis(np.array([float(n), float(base)])) @ self.coefficients
        return float(here / there if self.law.inverse else there / here)

    def at(self, n: float) -> Interval:
        """Throughput at ``n``, with the interval of the law's value (not of the next run); ``high`` is None with a
        ``low`` if the runs set no upper bound."""
        row = self.law.basis(np.array([float(n)]))[0]
        value, middle, reach = float(row @ self.coefficients), float(row @ self.linear), self._reach(row)
        if reach is None:
            return Interval(1 / value if self.law.inverse else value)
        low, high = max(0.0, min(value, middle - reach)), max(value, middle + reach)
        if self.law.inverse:
            return Interval(1 / value, 1 / high, 1 / low if low > 0 else None)
        return Interval(value, low, high)

    def knee(self, target: float, *, base: float, furthest: float) -> Interval:
        """The N at which the efficiency against ``base`` falls to ``target``, up to ``furthest``. ``high`` is None
        with a ``low`` if it is beyond."""
        value = _crossing(lambda n: -float(self._weights_below(n, base, target) @ self.coefficients), base, furthest)
        if self.variances is None:
            return Interval(value)
        low = _crossing(lambda n: -self._distance(n, base, target) - 1, base, furthest)
        high = _crossing(lambda n: 1 - self._distance(n, base, target), base, furthest)
        return Interval(value, min(low, value), max(high, value) if high < furthest else None)

    def _distance(self, n: float, base: float, target: float) -> float:
        """How far the efficiency at ``n`` is below ``target``, in half widths of its interval."""
        weights = self._weights_below(n, base, target)
        reach, distance = self._reach(weights), float(weights @ self.linear)
        return distance / reach if reach else float(np.copysign(np.inf, distance))

    def _weights_below(self, n: float, base: float, target: float) -> Floats:
        """Weights of the coefficients; the sum is above 0 if the efficiency at ``n`` is below ``target``."""
        there, here = self.law.basis(np.array([float(n), float(base)]))
        ideal = target * n / base
        return np.asarray(ideal * there - here if self.law.inverse else ideal * here - there, np.float64)

    def _reach(self, weights: Floats) -> float | None:
        """Half the width of the interval of a weighted sum of the coefficients; None if it is unknown."""
        if self.variances is None:
            return None
        return self._t(weights) * float(np.sqrt(np.square(weights @ self.means) @ self.variances))

    def _t(self, weights: Floats) -> float:
        """Student's t of such a sum, with the degrees of freedom of Welch and Satterthwaite."""
        parts = np.square(weights @ self.means) * self.variances
        total = float(parts.sum())
        free = total**2 / float(np.sum(np.square(parts) / self.free)) if total > 0 else float(self.free.sum())
        return float(special.stdtrit(free, (1 + CONFIDENCE) / 2))


def fit(law: Law, n: Sequence[float], x: Sequence[float]) -> Fit | None:
    """``law`` through the points; None when there are fewer different ``n`` than it has parameters, X1 included.

    Raises:
        ValueError: a throughput that is not positive.
    """
    where, measured = np.asarray(n, float), np.asarray(x, float)
    if np.any(measured <= 0) or np.any(where <= 0):
        raise ValueError("throughput and N must be positive")
    width = len(law.parameters) + 1
    if len(set(n)) < width:
        return None
    unit = float(measured[np.argmin(where)])  # coefficients near 1
    rows = law.basis(where)
    goal = unit / measured if law.inverse else measured / unit
    solved = optimize.least_squares(
        lambda c: np.log(rows @ c / goal),
        optimize.nnls(rows / goal[:, None], np.ones_like(goal))[0] + 1e-9,
        jac=lambda c: rows / (rows @ c)[:, None],
        bounds=(0, np.inf),
        x_scale="jac",
        xtol=1e-12, ftol=1e-14, gtol=1e-12,
    )  # fmt: skip
    best = np.where(solved.active_mask < 0, 0.0, solved.x)
    missed = np.log(goal / (rows @ best))
    inverse = np.linalg.pinv(rows / (rows @ best)[:, None])
    of_size = [where == size for size in np.unique(where)]
    step = np.asarray(inverse @ missed if np.any(best == 0) else np.zeros(width), np.float64)
    runs = np.array([int(np.sum(here)) for here in of_size])
    variances = None
    if np.all(runs > 1):
        variances = np.array([missed[here].var(ddof=1) for here in of_size]) / runs
    scale = 1 / unit if law.inverse else unit
    residuals = -missed if law.inverse else missed
    return Fit(
        law=law,
        coefficients=best * scale,
        linear=(best + step) * scale,
        means=np.stack([inverse[:, here].sum(axis=1) for here in of_size], axis=-1) * scale,
        variances=variances,
        free=runs - 1.0,
        residuals=tuple(float(r) for r in residuals),
        lack=_lack_of_fit([residuals[here] for here in of_size], int(np.sum(best > 0))),
    )


def _lack_of_fit(groups: Sequence[Floats], coefficients: int) -> LackOfFit | None:
    """The F test of the misfit of means against the scatter within sizes (Draper & Smith 1998, ch. 2)."""
    runs = sum(len(group) for group in groups)
    within_free, between_free = runs - len(groups), len(groups) - coefficients
    if within_free < 1:
        return None
    within = sum(float(np.sum(np.square(group - group.mean()))) for group in groups) / within_free
    misfit = sum(len(group) * float(group.mean()) ** 2 for group in groups)
    p_value = None
    if between_free > 0:
        floor = max(within, _SCATTER_OF_NOTHING**2)
        p_value = float(stats.f.sf(misfit / between_free / floor, between_free, within_free))
    return LackOfFit(float(np.sqrt(within)), float(np.sqrt(misfit / runs)), p_value)


def _crossing(height: Callable[[float], float], base: float, furthest: float) -> float:
    """The first N from ``base`` on where ``height`` falls below 0; ``furthest`` where it does not."""
    where = np.geomspace(base, furthest, 60)
    below = next((i for i, n in enumerate(where) if height(float(n)) < 0), None)
    if below is None:
        return furthest
    if below == 0:
        return base
    return float(optimize.brentq(height, where[below - 1], where[below], rtol=1e-6))


_EXCLUDED: Final = 0.01
"""A law is excluded below this p-value of its F test. Strict: intervals leave out a law that is excluded by mistake."""


def find_possible(fits: Sequence[Fit]) -> list[Fit]:
    """The laws that the runs do not exclude, the one with the smallest variance of residuals first."""
    possible = [one for one in fits if one.lack is None or one.lack.p_value is None or one.lack.p_value >= _EXCLUDED]
    return sorted(possible, key=lambda one: one.rms**2 / max(1, len(one.residuals) - len(one.coefficients)))


def choose(possible: Sequence[Fit], fits: Sequence[Fit]) -> tuple[Fit | None, list[str]]:
    """The law that the runs show, and why: the only one that they do not exclude, if it was tested itself."""
    if not possible:
        return None, ["No law fits the runs: no knee and no prediction is computed.", *map(quality, fits)]
    first, names = possible[0], ", ".join(one.law.name for one in possible)
    if len(possible) > 1:
        return None, [f"{names} cannot be told apart: more sizes and repeats tell.", quality(first)]
    if first.law is LOGARITHMIC or first.means.shape[1] == len(first.coefficients):
        return None, [
            f"{names} is the only law that is not excluded: a further size shows whether it holds.",
            quality(first),
        ]
    return first, [f"{names} is used: the runs exclude the other laws.", quality(first)]


def quality(fitted: Fit) -> str:
    """How far runs of one size scatter, and how far the law misses their means, in one sentence."""
    lack = fitted.lack
    if lack is None:
        return (
            f"{fitted.law.name} misses the runs by {fitted.rms:.1%}; with a single run of each size scatter and misfit"
            " cannot be told apart."
        )
    start = f"Runs of one size scatter by {lack.scatter:.1%}; {fitted.law.name} misses the means of the sizes by"
    if lack.p_value is None:
        return f"{start} {lack.misfit:.1%}, having as many parameters as there are sizes."
    explained = "which the scatter explains" if lack.p_value >= _EXCLUDED else "more than the scatter explains"
    return f"{start} {lack.misfit:.1%}, {explained} (F test for lack of fit: {format_p_value(lack.p_value)})."


def format_p_value(p_value: float) -> str:
    """``p = 0.031``."""
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"
