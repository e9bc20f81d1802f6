"""Finds the laws that a study does not exclude, and gives the reasons as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hpcjobs.scaling.fits import LOGARITHMIC, Fit

_EXCLUDED: Final = 0.01
"""A law is excluded below this p-value of its F test. Strict: intervals leave out what is excluded by mistake."""


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
