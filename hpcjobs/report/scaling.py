"""From the runs of a study to what they say: speed-up, efficiency, fits, the knee, the next doubling.

N is the number of nodes where all sizes have the same tasks per node, else the number of ranks. Speed-up is
against the smallest N measured (``baseline``), S = X(N) / X(base); efficiency is S / (N / base), so the
smallest size has 1 by definition.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from hpcjobs.errors import RequestError
from hpcjobs.report.fits import AMDAHL, GUSTAFSON, USL, Fit, Interval, fit, median_interval
from hpcjobs.report.points import mixtures

_POOR = 0.25
"""Root mean square of the relative residuals above which a law describes nothing."""
_FURTHEST = 64
"""The knee is looked for up to this many times the largest size measured."""


class Group(NamedTuple):
    """All repeats of one size. Shares are of a step, 0 to 1; None: not measured."""

    n: int
    nodes: int
    ranks: int
    runs: int
    throughput: Interval
    speedup: Interval
    efficiency: Interval
    step_s: float | None
    compute: float | None
    communication: float | None
    data_wait: float | None
    checkpoint: float | None
    cpu_efficiency: float | None
    gpu_utilization: float | None
    queue_wait_s: float | None
    epoch_s: float | None
    energy_j: float | None
    energy_source: str | None
    cost_per_million: float | None
    """Per million samples (of the unit that throughput counts)."""
    currency: str | None


class Knee(NamedTuple):
    """The largest N whose efficiency is at least ``target``."""

    target: float
    measured: int | None
    fitted: int | None
    beyond: bool
    """The fitted one lies beyond what was measured: an extrapolation."""


class Analysis(NamedTuple):
    """Everything a report shows."""

    unit: str
    per: str
    """``nodes`` or ``ranks``: what N counts."""
    mode: str
    groups: list[Group]
    fits: list[Fit]
    believed: Fit | None
    words: list[str]
    """What the fits are worth with this many points; the knee; the next doubling."""
    knee: Knee
    doubling: Interval | None
    """Throughput at twice the largest N, by the believed fit."""
    mixed: list[str]
    left_out: list[str]
    """Runs without a figure, and why."""


def analyse(runs: pl.DataFrame, *, mode: str, target: float = 0.8, allow_mixed: bool = False) -> Analysis:
    """What the runs of a study say.

    Raises:
        RequestError: no run has a figure yet; or runs of different code, images or node models are mixed.
    """
    sound = runs.filter(pl.col("throughput").is_not_null() & (pl.col("throughput") > 0))
    left_out = [f"job {r['job_id']}: {r['state'] or 'not known'}" for r in _rest(runs, sound).to_dicts()]
    if sound.is_empty():
        raise RequestError("no run of the study has ended with a figure yet", hint="; ".join(left_out[:5]) or None)
    mixed = mixtures(sound)
    if mixed and not allow_mixed:
        raise RequestError(
            f"the study mixes {'; '.join(mixed)}", hint="measure it anew, or --allow-mixed, which says so in the report"
        )
    per = "nodes" if sound["ntasks_per_node"].n_unique() == 1 else "ranks"
    base = sound.filter(pl.col(per) == sound[per].min())["throughput"].to_list()
    smallest = int(sound[per].to_list()[0])
    groups = [_group(part, per, smallest, base) for (_,), part in sound.group_by([per], maintain_order=True)]
    n, x = [float(v) for v in sound[per]], [float(v) for v in sound["throughput"]]
    laws = (GUSTAFSON, USL) if mode == "weak" else (AMDAHL, USL)
    fits = [found for law in laws if (found := fit(law, n, x)) is not None]
    believed, why = believe(fits, groups, per=per)
    knee = _knee(groups, believed, target)
    doubling = believed.at(2 * groups[-1].n) if believed else None
    words = [why, *_said(knee, doubling, groups, per, unit=str(sound["unit"][0]))]
    return Analysis(
        str(sound["unit"][0]), per, mode, groups, fits, believed, words, knee, doubling, mixed, left_out
    )  # fmt: skip


def _rest(runs: pl.DataFrame, sound: pl.DataFrame) -> pl.DataFrame:
    return runs.filter(~pl.col("job_id").is_in(sound["job_id"].to_list()))


def _group(part: pl.DataFrame, per: str, smallest: int, base: list[float]) -> Group:
    measured = [float(v) for v in part["throughput"]]
    first = part.to_dicts()[0]
    n = int(first[per])
    ratio = _ratio(measured, base) if n != smallest else Interval(1.0, 1.0, 1.0)
    ideal = n / smallest
    step, comm, wait = (_median(part, name) for name in ("step_s", "communication_s", "data_wait_s"))
    shares = [None if v is None or not step else min(1.0, max(0.0, v / step)) for v in (comm, wait)]
    paid = part.filter(pl.col("cost").is_not_null() & (pl.col("samples") > 0))
    return Group(
        n=n,
        nodes=int(first["nodes"]),
        ranks=int(first["ranks"]),
        runs=len(part),
        throughput=median_interval(measured),
        speedup=ratio,
        efficiency=Interval(*(value / ideal for value in ratio)),
        step_s=step,
        compute=None if step is None else max(0.0, 1 - sum(share for share in shares if share is not None)),
        communication=shares[0],
        data_wait=shares[1],
        checkpoint=_median(part, "checkpoint_share"),
        cpu_efficiency=_median(part, "cpu_efficiency"),
        gpu_utilization=_median(part, "gpu_utilization"),
        queue_wait_s=_median(part, "queue_wait_s"),
        epoch_s=_median(part, "epoch_s"),
        energy_j=_median(part, "energy_j"),
        energy_source=first["energy_source"],
        cost_per_million=sum(paid["cost"]) / sum(paid["samples"]) * 1e6 if len(paid) else None,
        currency=first["currency"],
    )


def _median(part: pl.DataFrame, column: str) -> float | None:
    value: Any = part[column].median()
    return None if value is None else float(value)


def _ratio(measured: list[float], base: list[float]) -> Interval:
    """Ratio of medians, with the bootstrap interval over both."""
    value = float(np.median(measured) / np.median(base))
    if len(measured) < 2 or len(base) < 2:
        return Interval(value, float("nan"), float("nan"))
    random = np.random.default_rng(0)
    drawn = [np.median(random.choice(np.asarray(side), size=(2000, len(side))), axis=1) for side in (measured, base)]
    low, high = (float(v) for v in np.percentile(drawn[0] / drawn[1], [2.5, 97.5]))
    return Interval(value, low, high)


def believe(fits: list[Fit], groups: list[Group], *, per: str) -> tuple[Fit | None, str]:
    """The fit to go by, and why, in words; None where there are too few sizes, or none fits."""
    sizes = len(groups)
    if not fits or sizes < 3:
        return None, f"{sizes} size{'s' * (sizes != 1)}: too few for a fit to be believed; measure at least three."
    simple, usl = fits[0], next((found for found in fits if found.law is USL), None)
    falls = any(b.throughput.value < a.throughput.value for a, b in pairwise(groups))
    nearest = min(found.rms for found in fits)
    if nearest > _POOR:
        return None, f"No law comes closer than {nearest:.0%} to the runs: none is to be believed."
    poor = simple.rms > _POOR
    if falls and usl is not None and usl.rms <= _POOR and (poor or usl.rms < simple.rms / 2):
        rough = " With three sizes its numbers are rough." if sizes == 3 else ""
        return usl, f"Throughput falls with more {per}: of the two laws only USL can say that.{rough}"
    if poor and sizes < 4:
        return (
            None,
            f"{simple.law.name} misses the runs by {simple.rms:.0%}; {sizes} sizes are too few for another law.",
        )
    if sizes < 4 or usl is None or usl.aicc is None or simple.aicc is None:
        return simple, (
            f"{simple.law.name} is the one to go by: {sizes} sizes cannot tell contention from crosstalk,"
            " so USL only repeats the points."
        )
    better = simple if simple.aicc <= usl.aicc and not poor else usl
    gap = abs(simple.aicc - usl.aicc)
    sure = "clearly" if gap > 6 else "probably" if gap > 2 else "barely, so look at both:"
    return better, f"{better.law.name} is {sure} the better description of {sizes} sizes (AICc differs by {gap:.1f})."


def _knee(groups: list[Group], believed: Fit | None, target: float) -> Knee:
    reached = [group.n for group in groups if group.efficiency.value >= target]
    if believed is None:
        return Knee(target, max(reached, default=None), None, beyond=False)
    base, largest = groups[0].n, groups[-1].n
    where = np.arange(base, largest * _FURTHEST + 1, dtype=float)
    fitted = believed.law.predict(where, believed.best[None, :])[0]
    sound = fitted / fitted[0] / (where / base) >= target
    last = int(where[np.argmin(sound) - 1]) if not sound.all() else int(where[-1])
    return Knee(target, max(reached, default=None), last, beyond=last > largest)


def _count(n: int, per: str) -> str:
    return f"{n} {per[:-1] if n == 1 else per}"


def _said(knee: Knee, doubling: Interval | None, groups: list[Group], per: str, *, unit: str) -> list[str]:
    largest = groups[-1].n
    told = [f"Efficiency of {knee.target:.0%} or more was measured up to {_count(knee.measured or 0, per)}."]
    if knee.fitted is not None:
        far = knee.fitted >= largest * _FURTHEST
        word = f"at least {knee.fitted}" if far else str(knee.fitted)
        beyond = f", which is an extrapolation beyond the {largest} measured" if knee.beyond else ""
        told.append(f"By the fit the knee is at {word} {per[:-1] if word == '1' else per}{beyond}.")
    if doubling is not None:
        told.append(  # intervals of the fit; what the law leaves out is not in them
            f"Twice as many ({2 * largest} {per}) would give {doubling.value:,.0f} {unit}"
            f" ({doubling.low:,.0f} to {doubling.high:,.0f}, if the law holds beyond what was measured)."
        )
    return told
