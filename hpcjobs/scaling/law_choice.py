"""Chooses the law that describes a study, and gives the reasons as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from hpcjobs.scaling.fits import AMDAHL, USL, Fit

_SIGNIFICANT: Final = 0.05
_TOLERATED_MISFIT: Final = 0.05
"""A law that misses the sizes' means by no more than this is of use, however exactly the misfit is known."""
_POOR: Final = 0.25
"""Root mean square of the residuals above which a law is refused where no test can tell: every size has a single run,
or the law has a parameter for every size."""


def choose(fits: Sequence[Fit], throughputs: Sequence[float], *, per: str) -> tuple[Fit | None, list[str]]:
    """The law to compute the knee and predictions by, and why; None where there are too few sizes, or no law fits.

    With four sizes or more a strong study is described by the USL, which contains Amdahl's law (kappa = 0): so its
    intervals hold whichever of the two is true. Else the law with fewer parameters is chosen, unless it fits badly.

    Args:
        throughputs: mean of each size, smallest size first.
    """
    sizes = len(throughputs)
    if not fits or sizes < 3:
        return None, [f"{sizes} size{'s' * (sizes != 1)}: too few to choose a law; measure at least three."]
    simple, usl = fits[0], next((fitted for fitted in fits if fitted.law is USL), None)
    falls = any(after < before for before, after in pairwise(throughputs))
    if usl is not None and sizes >= 4 and simple.law is AMDAHL and _fits(usl):
        zero = usl.parameters["kappa"].value == 0
        reason = (
            "USL is used. It finds no crosstalk (kappa is 0), so it is Amdahl's law here."
            if zero
            else "USL is used: it contains Amdahl's law, which has no crosstalk (kappa)."
        )
        return usl, [reason, quality(usl)]
    if _fits(simple):
        few = f" {sizes} sizes cannot tell contention from crosstalk." if sizes == 3 else ""
        return simple, [f"{simple.law.name}'s law is used.{few}", quality(simple)]
    if usl is not None and _fits(usl) and (sizes >= 4 or falls):
        rough = " With three sizes its numbers are rough." if sizes == 3 else ""
        cause = f"Throughput falls with more {per}: " if falls else f"{simple.law.name}'s law does not fit: "
        return usl, [f"{cause}USL is used.{rough}", quality(usl)]
    return None, ["No law fits the runs: no knee and no prediction is computed.", *map(quality, fits)]


def find_rival(fits: Sequence[Fit], chosen: Fit | None) -> Fit | None:
    """Another law that the runs do not contradict, where the one chosen does not contain it: the runs do not show which
    of the two holds beyond what was measured."""
    if chosen is None or chosen.law is USL:
        return None
    rivals = [fitted for fitted in fits if fitted is not chosen and fitted.lack is not None]
    return next((rival for rival in rivals if rival.lack and (rival.lack.p_value or 0.0) >= _SIGNIFICANT), None)


def _fits(fitted: Fit) -> bool:
    lack = fitted.lack
    if lack is None or lack.p_value is None:
        return fitted.rms <= _POOR
    return lack.p_value >= _SIGNIFICANT or lack.misfit <= _TOLERATED_MISFIT


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
    explained = "which the scatter explains" if lack.p_value >= _SIGNIFICANT else "more than the scatter explains"
    return f"{start} {lack.misfit:.1%}, {explained} (F test for lack of fit: {format_p_value(lack.p_value)})."


def format_p_value(p_value: float) -> str:
    """``p = 0.031``."""
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"
