"""Scaling laws fitted to throughput, with intervals.

X(N) is throughput on N units (nodes, or ranks on one node). With X1 = X(1):

- Amdahl (1967), strong scaling:   X = X1 / (s + (1 - s)/N),              s: serial fraction
- Gustafson (1988), weak scaling:  X = X1 (s + (1 - s) N),                s: serial fraction of the scaled run
- USL (Gunther, 1993):             X = X1 N / (1 + sigma (N-1) + kappa N (N-1)), contention and crosstalk

Each is linear in a change of variables and is solved by least squares of relative errors, with parameters
kept at 0 or above. Intervals are 95 % bootstrap percentiles: relative residuals, scaled up for the degrees
of freedom the fit has used and by Student's t over the normal quantile (few points: wider), are drawn
again and the law refitted (Efron & Tibshirani 1993, ch. 9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t at 97.5 %, by degrees of freedom from 1."""


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


class Law(NamedTuple):
    """A scaling law: its linear form, and how its parameters are read from that."""

    name: str
    parameters: tuple[str, ...]
    design: Callable[[Floats, Floats], Floats]
    """(N, X) -> rows whose product with the coefficients is 1 for a point on the curve."""
    read: Callable[[Floats], Floats]
    """Coefficients -> X1, then `parameters`; the last axis."""
    predict: Callable[[Floats, Floats], Floats]
    """(N, what `read` gave) -> X."""


def _stack(*columns: Floats) -> Floats:
    return np.stack(columns, axis=-1)


AMDAHL: Final = Law(
    "Amdahl",
    ("serial",),
    lambda n, x: _stack(x, x / n),
    lambda c: _stack(1 / (c[..., 0] + c[..., 1]), c[..., 0] / (c[..., 0] + c[..., 1])),
    lambda n, p: p[..., :1] / (p[..., 1:2] + (1 - p[..., 1:2]) / n),
)
GUSTAFSON: Final = Law(
    "Gustafson",
    ("serial",),
    lambda n, x: _stack(1 / x, n / x),
    lambda c: _stack(c[..., 0] + c[..., 1], c[..., 0] / (c[..., 0] + c[..., 1])),
    lambda n, p: p[..., :1] * (p[..., 1:2] + (1 - p[..., 1:2]) * n),
)
USL: Final = Law(
    "USL",
    ("sigma", "kappa"),
    lambda n, x: _stack(x / n, x / n * (n - 1), x * (n - 1)),
    lambda c: _stack(1 / c[..., 0], c[..., 1] / c[..., 0], c[..., 2] / c[..., 0]),
    lambda n, p: p[..., :1] * n / (1 + p[..., 1:2] * (n - 1) + p[..., 2:3] * n * (n - 1)),
)


class Fit(NamedTuple):
    """A law fitted to points. ``draws``: the parameters of every bootstrap sample, for intervals of predictions."""

    law: Law
    x1: Interval
    parameters: dict[str, Interval]
    residuals: tuple[float, ...]
    """(measured - fitted) / fitted, point by point."""
    aicc: float | None
    """Akaike's criterion for small samples; None with too few points for it."""
    draws: Floats
    best: Floats

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    def at(self, n: float) -> Interval:
        """Throughput at ``n``, with the interval of the fit (not of the next run)."""
        where = np.array([float(n)])
        drawn = self.law.predict(where, self.draws)[:, 0]
        value = float(self.law.predict(where, self.best[None, :])[0, 0])
        return _interval(value, drawn)


def fit(law: Law, n: Sequence[float], x: Sequence[float], *, samples: int = 1000, seed: int = 0) -> Fit | None:
    """``law`` through the points; None when there are fewer different ``n`` than it has parameters.

    Raises:
        ValueError: a throughput that is not positive.
    """
    where, measured = np.asarray(n, float), np.asarray(x, float)
    if np.any(measured <= 0) or np.any(where <= 0):
        raise ValueError("throughput and N must be positive")
    free = len(measured) - len(law.parameters) - 1
    if len(set(n)) < len(law.parameters) + 1:
        return None
    best = law.read(_solve(law.design(where, measured[None, :])))[0]
    fitted = law.predict(where, best[None, :])[0]
    residuals = (measured - fitted) / fitted
    draws = _bootstrap(law, where, fitted, residuals, free=free, samples=samples, seed=seed)
    intervals = [_interval(float(value), draws[:, i]) for i, value in enumerate(best)]
    named = dict(zip(law.parameters, intervals[1:], strict=True))
    told = tuple(float(r) for r in residuals)
    return Fit(law, intervals[0], named, told, _aicc(residuals, len(law.parameters) + 2), draws, best)


def _bootstrap(law: Law, n: Floats, fitted: Floats, residuals: Floats, *, free: int, samples: int, seed: int) -> Floats:
    if free < 1:  # as many parameters as points: nothing says how far off they are
        return np.full((1, len(law.parameters) + 1), np.nan)
    random = np.random.default_rng(seed)
    centred = residuals - residuals.mean()
    t = _T[free - 1] if free <= len(_T) else 1.96 + 2.4 / free
    scaled = centred * np.sqrt(len(centred) / free) * (t / 1.96)
    drawn = random.choice(scaled, size=(samples, len(scaled)))
    return law.read(_solve(law.design(n, fitted * np.clip(1 + drawn, 0.05, None))))


def _solve(rows: Floats) -> Floats:
    """Least squares of rows @ c = 1 with c >= 0, for a batch: the best over every set of coefficients left free."""
    batch, _, width = rows.shape
    best, least = np.zeros((batch, width)), np.full(batch, np.inf)
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            part = rows[:, :, chosen]
            normal = np.einsum("bij,bik->bjk", part, part)
            right = part.sum(axis=1)[..., None]
            ridge = 1e-14 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(count)
            found = np.linalg.solve(normal + ridge, right)[..., 0]
            error = np.square(np.einsum("bij,bj->bi", part, found) - 1).sum(axis=1)
            better = (found >= 0).all(axis=1) & (error < least - 1e-15)
            least = np.where(better, error, least)
            best[better] = 0
            best[np.ix_(better, chosen)] = found[better]
    return best


def _interval(value: float, draws: Floats) -> Interval:
    """The 2.5 and 97.5 percentiles; never without the value itself, where a parameter is at its bound."""
    low, high = (float(v) for v in np.percentile(draws, [2.5, 97.5]))
    return Interval(value, min(low, value), max(high, value)) if low == low else Interval(value, low, high)


def _aicc(residuals: Floats, parameters: int) -> float | None:
    """n ln(RSS/n) + 2k + 2k(k+1)/(n-k-1) (Hurvich & Tsai 1989); ``parameters`` counts the variance."""
    count = len(residuals)
    if count - parameters - 1 < 1:
        return None
    spread = max(float(np.mean(np.square(residuals))), 1e-12)
    return float(count * np.log(spread) + 2 * parameters + 2 * parameters * (parameters + 1) / (count - parameters - 1))


def median_interval(values: Sequence[float], *, samples: int = 2000, seed: int = 0) -> Interval:
    """The median, and the 2.5 and 97.5 percentiles of the medians of bootstrap samples."""
    known = np.asarray(values, float)
    if len(known) == 1:
        return Interval(float(known[0]), float("nan"), float("nan"))
    random = np.random.default_rng(seed)
    drawn = np.median(random.choice(known, size=(samples, len(known))), axis=1)
    return _interval(float(np.median(known)), drawn)
