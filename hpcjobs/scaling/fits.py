"""Means and ratios of repeated runs, scaling laws fitted to throughput, and the choice of a law, with 95 % intervals.

Throughput varies by factors, so statistics are computed on logarithms: the mean is the geometric one (the median of
log-normal runs). Two or three runs of a size tell little of its scatter, so the scatter of all sizes counts too
(`Scatter`), with the degrees of freedom of a sum of variances (Welch 1947, Satterthwaite 1946).

X(N) is throughput on N units (nodes, or ranks on one node). With X1 = X(1):

- Amdahl (1967), strong scaling:   X = X1 / (s + (1 - s)/N),              s: serial fraction
- Gustafson (1988), weak scaling:  X = X1 (s + (1 - s) N),                s: serial fraction of the scaled run
- USL (Gunther, 1993):             X = X1 N / (1 + sigma (N-1) + kappa N (N-1)), contention and crosstalk
- logarithmic overhead:            X = X1 N / (1 + serial (N-1) + log N log2 N), as of messages along a tree

Each law is a sum of coefficients times functions of N, for X or for 1/X. The coefficients, none below 0, have the
least squares of log(measured / fitted). Near the solution that is a linear regression: the coefficients are weighted
sums of the means of the sizes, with the variances of `Scatter`. A prediction has an interval of Student's t. The
interval of the knee contains every N at which the efficiency may be the target; the interval of a parameter contains
every value that it may have (Fieller 1954).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

CONFIDENCE: Final = 0.95
Floats = npt.NDArray[np.float64]
_SCATTER_OF_NOTHING: Final = 1e-9
"""Relative scatter below which repeats count as equal."""


class Interval(NamedTuple):
    """An estimate and its 95 % interval; ``low`` and ``high`` are None if the error is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def scale_by(self, factor: float) -> Interval:
        """The same estimate in another unit."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Interval(self.value * factor, low, high)


def reaches(value: float, least: float) -> bool:
    """Whether ``value`` is at least ``least``; a difference that floating-point arithmetic makes does not count."""
    return value >= least - _ROUNDING_ERROR * abs(least)


_ROUNDING_ERROR: Final = 1e-9


class Ratio(NamedTuple):
    """The ratio of two means."""

    ratio: Interval
    p_value: float | None
    """p-value of the t test that the means are equal; None: the scatter of a side is not known."""


class Scatter(NamedTuple):
    """The variance of logarithms of runs of each size, moderated by the variance of all sizes (Smyth 2004).

    Larger sizes often scatter more, so a size's variance counts with its degrees of freedom, and the mean variance of
    all repeated sizes with `_PRIOR_FREEDOM` degrees of freedom. In that mean each size counts alike: otherwise a size
    with many runs would speak for those with few. A size with fewer runs than the others takes less from them, so that
    its own scatter decides. tests/figures/test_coverage.py simulates the coverage of the intervals.
    """

    variances: Floats
    """Variance of the runs of each size alone; 0 for a single run."""
    free: Floats
    """Runs of each size less one."""
    weights: Floats
    """Row by size: the weight of each size's own variance in its moderated variance."""
    runs: Floats
    """Number of runs of each size."""
    rounding: Floats
    """Variance of each size's mean that rounded times make: known, and not smaller with more runs."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]], rounding: Floats) -> Scatter | None:
        """The scatter of the logarithms in ``groups``, one for each size; None: no size has two runs."""
        free = np.array([len(group) - 1.0 for group in groups])
        if not free.any():
            return None
        variances = np.array([float(np.var(group, ddof=1)) if len(group) > 1 else 0.0 for group in groups])
        variances = np.where(variances < _SCATTER_OF_NOTHING**2, 0.0, variances)
        is_repeated = free > 0
        of_all = np.tile(is_repeated / is_repeated.sum(), (len(groups), 1))
        prior = _PRIOR_FREEDOM * np.minimum(1, free / free[is_repeated].mean())
        weights = (prior[:, None] * of_all + np.diag(free)) / np.where(is_repeated, prior + free, 1)[:, None]
        return cls(variances, free, weights, free + 1, rounding)

    @property
    def is_known(self) -> bool:
        """False: the runs of each size are equal, although times were not rounded."""
        return bool(self.variances.any() or self.rounding.any())

    def is_known_of(self, of_means: Floats) -> bool:
        """Whether each size with a weight has two runs: the scatter of others tells nothing certain of a single run."""
        return self.is_known and bool(self.free[of_means != 0].all())

    def spread(self, of_means: Floats) -> tuple[float, float]:
        """Standard error of the sum of the sizes' means with these weights, and its degrees of freedom.

        For few runs, equal variances would give too many degrees of freedom and the measured variances too few: the
        result is the weighted geometric mean of both. The variance of rounding is known, so the total of both variances
        has the degrees of freedom of the scatter x (total / scatter)^2.
        """
        of_own = np.square(of_means) / self.runs @ self.weights
        variance, rounding = float(of_own @ self.variances), float(np.square(of_means) @ self.rounding)
        has_runs = self.free > 0
        weights, free, variances = of_own[has_runs], self.free[has_runs], self.variances[has_runs]
        freedom = weights.sum() ** 2 / np.sum(np.square(weights) / free)
        if variance > 0:
            measured = variance**2 / np.sum(np.square(weights * variances) / free)
            freedom = freedom**_OF_EQUAL * measured ** (1 - _OF_EQUAL)
        if rounding > 0:
            freedom *= np.square(1 + rounding / variance) if variance > 0 else np.inf
        return float(np.sqrt(variance + rounding)), float(freedom)

    def beside(self, other: Scatter) -> Scatter:
        """The scatter of the sizes of two studies. Variances of one study do not moderate the other study."""
        own, others = len(self.runs), len(other.runs)
        weights = np.block([[self.weights, np.zeros((own, others))], [np.zeros((others, own)), other.weights]])
        return Scatter(
            np.concatenate([self.variances, other.variances]),
            np.concatenate([self.free, other.free]),
            weights,
            np.concatenate([self.runs, other.runs]),
            np.concatenate([self.rounding, other.rounding]),
        )

    def reach(self, of_means: Floats) -> float:
        """Half the width of the 95 % interval of such a sum."""
        error, freedom = self.spread(of_means)
        return error * float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


_PRIOR_FREEDOM: Final = 2.0
"""Degrees of freedom with which the scatter of all sizes counts for each of them that has as many runs as the mean."""


_OF_EQUAL: Final = 0.6
"""Weight of the degrees of freedom that equal variances would have."""


class RunGroups:
    """The runs of a study: groups of positive values, one for each size.

    Args:
        rounding: of each size the variance of a logarithm that rounded times make; default none.
    """

    def __init__(self, groups: Sequence[Sequence[float]], rounding: Sequence[float] | None = None) -> None:
        logs = [np.log(np.asarray(group, float)) for group in groups]
        self.means = np.array([float(group.mean()) for group in logs])
        # Relative to the first run, so that the mean of equal runs is exactly their value.
        self._values = [
            float(group[0] * np.exp(np.mean(log - log[0]))) for group, log in zip(groups, logs, strict=True)
        ]
        of_sizes = np.zeros(len(logs)) if rounding is None else np.asarray(rounding, np.float64)
        self.scatter = Scatter.of([list(group) for group in logs], of_sizes)

    def mean(self, group: int) -> Interval:
        """The geometric mean of a group; without an interval where the scatter is not known."""
        return self._estimate(self._values[group], np.eye(len(self.means))[group])

    def ratio(self, group: int, base: int) -> Interval:
        """The ratio of the mean of ``group`` to the mean of ``base``."""
        unit = np.eye(len(self.means))
        if group == base:
            return Interval(1.0)
        return self._estimate(self._values[group] / self._values[base], unit[group] - unit[base])

    def _estimate(self, value: float, weights: Floats) -> Interval:
        if self.scatter is None or not self.scatter.is_known_of(weights):
            return Interval(value)
        return _interval(value, self.scatter.reach(weights))

    def compare(self, group: int, other: RunGroups, base: int) -> Ratio:
        """The ratio to the mean of a group of another study; interval and p-value are of the same t test."""
        difference = float(self.means[group] - other.means[base])
        ratio = self._values[group] / other._values[base]
        if self.scatter is None or other.scatter is None:
            return Ratio(Interval(ratio), None)
        both = self.scatter.beside(other.scatter)
        weights = np.zeros(len(self.means) + len(other.means))
        weights[group], weights[len(self.means) + base] = 1, -1
        if not both.is_known_of(weights):
            return Ratio(Interval(ratio), None)
        error, freedom = both.spread(weights)
        p_value = 2 * float(special.stdtr(freedom, -abs(difference) / error))
        return Ratio(_interval(ratio, both.reach(weights)), p_value)


def _interval(value: float, reach: float) -> Interval:
    """``reach``: half the width of the interval of the logarithm."""
    factor = float(np.exp(reach))
    return Interval(value, value / factor, value * factor)


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
    """p-value of the F test for lack of fit; None: the law has as many coefficients above 0 as the study has sizes, or
    the scatter is not known."""


class Fit(NamedTuple):
    """A law fitted to points."""

    law: Law
    coefficients: Floats
    linear: Floats
    """The coefficients of the linear regression around the solution: they differ where one of them is kept at 0."""
    means: Floats
    """The share of each size's mean in ``linear``: one column per size."""
    scatter: Scatter | None
    """None: a size has a single run, or the scatter of the runs is not known."""
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
        """X(1) and the law's parameters by name, each at 0 or above."""
        ratios = {
            name: float(np.asarray(above) @ self.coefficients) / float(np.asarray(below) @ self.coefficients)
            for name, (above, below) in self.law.parameters.items()
        }
        return {"X(1)": self.at(1).value, **ratios}

    @property
    def intervals(self) -> dict[str, Interval]:
        """`parameters` with the 95 % intervals that they have if the law holds."""
        values = self.parameters
        bounds = {name: self._bound(values[name], *parts) for name, parts in self.law.parameters.items()}
        return {"X(1)": self.at(1), **bounds}

    def _bound(self, value: float, above: Sequence[float], below: Sequence[float]) -> Interval:
        """``value`` and the values that the ratio of the two sums may have, none below 0."""
        if self.scatter is None:
            return Interval(value)
        over, under = np.asarray(above, np.float64), np.asarray(below, np.float64)

        def distance(ratio: float) -> float:
            """How far the ratio is above the measured one, in half widths of the interval."""
            return self._distance(ratio * under - over)

        most = max(1.0, 1e3 * value)
        low, high = 0.0, None
        if distance(0.0) < -1:
            low = (
                float(optimize.brentq(lambda ratio: distance(ratio) + 1, 0.0, value)) if distance(value) > -1 else value
            )
        if distance(most) > 1:
            start = value if distance(value) < 1 else None
            high = value if start is None else float(optimize.brentq(lambda ratio: distance(ratio) - 1, start, most))
        return Interval(value, low, high)

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

        def below(n: float) -> Floats:
            """Weights of the coefficients; the sum is above 0 if the efficiency at ``n`` is below ``target``."""
            there, here = self.law.basis(np.array([float(n), float(base)]))
            ideal = target * n / base
            return np.asarray(ideal * there - here if self.law.inverse else ideal * here - there, np.float64)

        value = _crossing(lambda n: -float(below(n) @ self.coefficients), base, furthest)
        if self.scatter is None:
            return Interval(value)
        low = _crossing(lambda n: -self._distance(below(n)) - 1, base, furthest)
        high = _crossing(lambda n: 1 - self._distance(below(n)), base, furthest)
        return Interval(value, min(low, value), max(high, value) if high < furthest else None)

    def _distance(self, weights: Floats) -> float:
        """How far a weighted sum of the coefficients is above 0, in half widths of its interval."""
        reach, distance = self._reach(weights), float(weights @ self.linear)
        return distance / reach if reach else float(np.copysign(np.inf, distance))

    def _reach(self, weights: Floats) -> float | None:
        """Half the width of the interval of a weighted sum of the coefficients; None if it is unknown."""
        if self.scatter is None:
            return None
        return self.scatter.reach(weights @ self.means)


def fit(law: Law, n: Sequence[float], x: Sequence[float], rounding: Sequence[float] | None = None) -> Fit | None:
    """``law`` through the points; None when there are fewer different ``n`` than it has parameters, X1 included.

    Args:
        rounding: of each point the variance of log ``x`` that rounded times make; default none.

    Raises ValueError: a throughput that is not positive.
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
    negligible = np.max(rows * solved.x / (rows @ solved.x)[:, None], axis=0) < _NEGLIGIBLE
    best = np.where((solved.active_mask < 0) | negligible, 0.0, solved.x)
    missed = np.log(goal / (rows @ best))
    inverse = np.linalg.pinv(rows / (rows @ best)[:, None])
    of_size = [where == size for size in np.unique(where)]
    step = np.asarray(inverse @ missed if np.any(best == 0) else np.zeros(width), np.float64)
    scatter = None
    of_points = np.zeros_like(where) if rounding is None else np.asarray(rounding, np.float64)
    of_sizes = np.array([of_points[here].mean() for here in of_size])
    if all(np.sum(here) > 1 for here in of_size):
        scatter = Scatter.of([list(missed[here]) for here in of_size], of_sizes)
    scale = 1 / unit if law.inverse else unit
    residuals = -missed if law.inverse else missed
    return Fit(
        law=law,
        coefficients=best * scale,
        linear=(best + step) * scale,
        means=np.stack([inverse[:, here].sum(axis=1) for here in of_size], axis=-1) * scale,
        scatter=scatter if scatter is not None and scatter.is_known else None,
        residuals=tuple(float(r) for r in residuals),
        lack=_lack_of_fit([residuals[here] for here in of_size], int(np.sum(best > 0)), of_sizes),
    )


_NEGLIGIBLE: Final = 1e-7
"""A coefficient below this share of the fitted value at every N is set to 0: the solver is not more exact."""


def _lack_of_fit(groups: Sequence[Floats], coefficients: int, rounding: Floats) -> LackOfFit | None:
    """The F test of the misfit of means against the scatter within sizes (Draper & Smith 1998, ch. 2).

    Rounded times may move all runs of a size alike, so their variance is added to the variance of the
    means (`Scatter.spread`).
    """
    runs = np.array([float(len(group)) for group in groups])
    within_free, between_free = runs.sum() - len(groups), len(groups) - coefficients
    if within_free < 1:
        return None
    within = sum(float(np.sum(np.square(group - group.mean()))) for group in groups) / within_free
    squares = runs * np.square([group.mean() for group in groups])
    p_value = None
    expected = (within if within > _SCATTER_OF_NOTHING**2 else 0.0) + runs * rounding
    if between_free > 0 and np.all(expected > 0):
        ratio = float(np.sum(squares / expected)) / between_free
        freedom = min(1e9, within_free * (expected.mean() / within) ** 2) if within > 0 else 1e9
        p_value = float(stats.f.sf(ratio, between_free, freedom))
    return LackOfFit(float(np.sqrt(within)), float(np.sqrt(squares.sum() / runs.sum())), p_value)


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
        doubt = f"{names} is the only law that is not excluded: a further size shows whether it holds."
        return None, [doubt, quality(first)]
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
