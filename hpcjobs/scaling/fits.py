"""Scaling laws fitted to throughput, with 95 % intervals.

X(N) is throughput on N units (nodes, or ranks on one node). With X1 = X(1):

- Amdahl (1967), strong scaling:   X = X1 / (s + (1 - s)/N),              s: serial fraction
- Gustafson (1988), weak scaling:  X = X1 (s + (1 - s) N),                s: serial fraction of the scaled run
- USL (Gunther, 1993):             X = X1 N / (1 + sigma (N-1) + kappa N (N-1)), contention and crosstalk

Each law is a sum of coefficients times functions of N, for X or for 1/X. The coefficients, none below 0, have the
least squares of log(measured / fitted). Near the solution that is a linear regression, whose covariance gives the
intervals: Student's t for a prediction, and Fieller's theorem (1954) for parameters and speed-ups, which are
ratios of sums of coefficients. The knee's interval holds every N whose efficiency may be the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from hpcjobs.scaling.intervals import CONFIDENCE, Interval

Floats = npt.NDArray[np.float64]
_SCATTER_OF_NOTHING: Final = 1e-9
"""Relative scatter below which repeats count as equal."""


class Law(NamedTuple):
    """A scaling law: the functions of N whose sum it is, and its parameters as ratios of sums of coefficients."""

    name: str
    basis: Callable[[Floats], Floats]
    """N -> one row per N, whose product with the coefficients is X (or 1/X, where ``inverse``)."""
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


class LackOfFit(NamedTuple):
    """Whether the law misses the sizes' means by more than the runs' scatter explains."""

    scatter: float
    """Relative standard deviation of runs of one size."""
    misfit: float
    """Root mean square of the law's relative distance from the sizes' means."""
    p_value: float | None
    """Of the F test for lack of fit; None: the law has a parameter for every size."""


class Fit(NamedTuple):
    """A law fitted to points."""

    law: Law
    coefficients: Floats
    linear: Floats
    """The coefficients of the linear regression around the solution: they differ where one of them is kept at 0."""
    covariance: Floats | None
    """Of ``linear``; None: as many parameters as points."""
    t: float
    """Student's t of the intervals."""
    residuals: tuple[float, ...]
    """log(measured / fitted), point by point."""
    aicc: float | None
    """Akaike's criterion for small samples; None with too few points for it."""
    lack: LackOfFit | None
    """None: no size has two runs."""

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    @property
    def x1(self) -> Interval:
        """Throughput at N = 1."""
        return self.at(1)

    @property
    def parameters(self) -> dict[str, Interval]:
        """The law's parameters by name, each at 0 or above."""
        return {
            name: self._ratio(np.asarray(above, float), np.asarray(below, float))
            for name, (above, below) in self.law.parameters.items()
        }

    def at(self, n: float) -> Interval:
        """Throughput at ``n``, with the interval of the law's value (not of the next run)."""
        row = self.law.basis(np.array([float(n)]))[0]
        value = float(row @ self.coefficients)
        if self.covariance is None:
            return _throughput_interval(Interval(value), self.law)
        reach = self.t * float(np.sqrt(row @ self.covariance @ row))
        middle = float(row @ self.linear)
        if middle - reach <= 0:
            return _throughput_interval(Interval(value), self.law)
        return _throughput_interval(Interval(value, min(value, middle - reach), max(value, middle + reach)), self.law)

    def speedup(self, n: float, base: float) -> Interval:
        """X(n) / X(base)."""
        rows = self.law.basis(np.array([float(n), float(base)]))
        above, below = rows[::-1] if self.law.inverse else rows
        return self._ratio(above, below)

    def efficiency(self, n: float, base: float) -> Interval:
        """Speed-up over the ideal one, n / base."""
        return self.speedup(n, base).scale_by(base / n)

    def knee(self, target: float, *, base: float, furthest: float) -> Interval:
        """Where the efficiency against ``base`` falls to ``target``, looked for up to ``furthest``; ``high`` is None
        beside a ``low`` where it lies beyond."""
        value = _crossing(lambda n: self.efficiency(n, base).value - target, base, furthest)
        if self.covariance is None:
            return Interval(value)
        low = _crossing(lambda n: -self._distance(n, base, target) - self.t, base, furthest)
        high = _crossing(lambda n: self.t - self._distance(n, base, target), base, furthest)
        return Interval(value, min(low, value), max(high, value) if high < furthest else None)

    def _distance(self, n: float, base: float, target: float) -> float:
        """By how many standard errors the efficiency at ``n`` is below ``target``."""
        rows = self.law.basis(np.array([float(n), float(base)]))
        ideal = n / base
        # Efficiency is below the target where this combination of the coefficients is above 0.
        weights = target * ideal * rows[0] - rows[1] if self.law.inverse else target * ideal * rows[1] - rows[0]
        assert self.covariance is not None
        error = float(np.sqrt(max(0.0, weights @ self.covariance @ weights)))
        distance = float(weights @ self.linear)
        return distance / error if error > 0 else float(np.copysign(np.inf, distance))

    def _ratio(self, above: Floats, below: Floats) -> Interval:
        """(above @ c) / (below @ c), by Fieller's theorem: all quotients q for which (above - q below) @ c may be 0."""
        value = float(above @ self.coefficients) / float(below @ self.coefficients)
        if self.covariance is None:
            return Interval(value)
        c, spread = self.linear, self.covariance * self.t**2
        a = (below @ c) ** 2 - below @ spread @ below
        b = (above @ c) * (below @ c) - above @ spread @ below
        inside = float(b**2 - a * ((above @ c) ** 2 - above @ spread @ above))
        if a <= 0:  # what is below the fraction bar may be 0
            return Interval(value)
        low, high = (float(b + sign * np.sqrt(max(0.0, inside))) / float(a) for sign in (-1, 1))
        return Interval(value, min(value, max(0.0, low)), max(value, high))


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
    start = optimize.nnls(rows / goal[:, None], np.ones_like(goal))[0] + 1e-9
    solved = optimize.least_squares(
        lambda c: np.log(rows @ c / goal),
        start,
        jac=lambda c: rows / (rows @ c)[:, None],
        bounds=(0, np.inf),
        x_scale="jac",
        xtol=1e-12, ftol=1e-14, gtol=1e-12,
    )  # fmt: skip
    best = np.where(solved.active_mask < 0, 0.0, solved.x)
    missed = np.log(goal / (rows @ best))
    slopes = rows / (rows @ best)[:, None]
    step = np.zeros(width)
    if np.any(best == 0):
        step = np.asarray(np.linalg.lstsq(slopes, missed, rcond=None)[0], np.float64)
    free = len(where) - width
    covariance = None
    if free > 0:
        variance = float(np.sum(np.square(missed - slopes @ step))) / free
        covariance = variance * np.linalg.inv(slopes.T @ slopes)
    scale = 1 / unit if law.inverse else unit
    residuals = -missed if law.inverse else missed
    return Fit(
        law=law,
        coefficients=best * scale,
        linear=(best + step) * scale,
        covariance=None if covariance is None else covariance * scale**2,
        t=float(stats.t.ppf((1 + CONFIDENCE) / 2, free)) if free > 0 else float("nan"),
        residuals=tuple(float(r) for r in residuals),
        aicc=_aicc(residuals, width + 1),
        lack=_lack_of_fit(where, residuals, width),
    )


def _lack_of_fit(n: Floats, residuals: Floats, parameters: int) -> LackOfFit | None:
    """The F test of the misfit of means against the scatter within sizes (Draper & Smith 1998, ch. 2)."""
    sizes = sorted(set(n.tolist()))
    groups = [residuals[n == size] for size in sizes]
    within_free, between_free = len(n) - len(sizes), len(sizes) - parameters
    if within_free < 1:
        return None
    within = sum(float(np.sum(np.square(group - group.mean()))) for group in groups) / within_free
    misfit = sum(len(group) * float(group.mean()) ** 2 for group in groups)
    p_value = None
    if between_free > 0:
        floor = max(within, _SCATTER_OF_NOTHING**2)
        p_value = float(stats.f.sf(misfit / between_free / floor, between_free, within_free))
    return LackOfFit(float(np.sqrt(within)), float(np.sqrt(misfit / len(n))), p_value)


def _throughput_interval(interval: Interval, law: Law) -> Interval:
    """Of X, where the law gives 1/X."""
    if not law.inverse:
        return interval
    value, low, high = interval
    return Interval(1 / value, None if high is None else 1 / high, None if low is None else 1 / low)


def _crossing(height: Callable[[float], float], base: float, furthest: float) -> float:
    """The first N from ``base`` on where ``height`` falls below 0; ``furthest`` where it does not."""
    where = np.geomspace(base, furthest, 60)
    below = next((i for i, n in enumerate(where) if height(float(n)) < 0), None)
    if below is None:
        return furthest
    if below == 0:
        return base
    return float(optimize.brentq(height, where[below - 1], where[below], rtol=1e-6))


def _aicc(residuals: Floats, parameters: int) -> float | None:
    """n ln(RSS/n) + 2k + 2k(k+1)/(n-k-1) (Hurvich & Tsai 1989); ``parameters`` counts the variance."""
    count = len(residuals)
    if count - parameters - 1 < 1:
        return None
    spread = max(float(np.mean(np.square(residuals))), 1e-12)
    return float(count * np.log(spread) + 2 * parameters + 2 * parameters * (parameters + 1) / (count - parameters - 1))
