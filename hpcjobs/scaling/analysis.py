"""Speed-up, efficiency, fitted laws, the knee and the next doubling, from the runs of a study.

N is the number of nodes if all sizes have the same tasks per node, otherwise the number of ranks. Speed-up is
against the smallest N measured (``baseline``), S = X(N) / X(base); efficiency is S / (N / base), so the
smallest size has 1 by definition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl

from hpcjobs.errors import RequestError
from hpcjobs.jobstats.derive import joint_energy_source
from hpcjobs.scaling.fits import LAWS, Fit, Interval, RunGroups, choose, find_possible, fit
from hpcjobs.scaling.runs import find_mixtures, rounding_variance
from hpcjobs.scaling.size_choice import count_of, find_reached
from hpcjobs.units import format_number

_FURTHEST = 2
"""The knee is searched up to this many times the largest measured size. The report predicts no further."""


class SizeResult(NamedTuple):
    """All repeats of one size. Shares are of a step, 0 to 1; None: not measured."""

    n: int
    nodes: int
    ranks: int
    runs: int
    measured: tuple[float, ...]
    """Throughput of each run."""
    throughput: Interval
    """The geometric mean of the runs."""
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
    """Cost of all runs over the samples (not tokens) that they used, times a million."""
    currency: str | None


class Knee(NamedTuple):
    """The largest N with an efficiency of at least ``target``."""

    target: float
    measured: int | None
    """Up to it the lower bounds of the efficiencies are at least ``target``; of single runs the values."""
    fitted: Interval | None
    """By the chosen law, as a real number; None: no law was chosen."""
    beyond: bool
    """The fitted knee is beyond the largest measured size: an extrapolation."""


class Analysis(NamedTuple):
    """Everything a report shows."""

    unit: str
    per: str
    """The unit of N: ``nodes`` or ``ranks``."""
    groups: list[SizeResult]
    fits: list[Fit]
    possible: list[Fit]
    """The laws that the runs do not exclude: the bounds of the knee and of the next doubling are over all of them."""
    chosen: Fit | None
    """The only one of them, if it was tested."""
    summary: list[str]
    """Which law was chosen and how well it fits; the knee; the next doubling."""
    knee: Knee
    doubling: Interval | None
    """Throughput at twice the largest N, by the chosen law."""
    mixed: list[str]
    left_out: list[str]
    """Runs without a figure, and why."""
    by_size: RunGroups
    """The runs of `groups`."""

    @property
    def can_exclude(self) -> bool:
        """Whether a law that is not in `possible` is excluded: each size has runs enough to tell, and they scatter."""
        return all(group.runs > 1 for group in self.groups) and self.by_size.mean(0).low is not None


def analyse(runs: pl.DataFrame, *, target: float = 0.8, allow_mixed: bool = False) -> Analysis:
    """Analyse the runs of a study.

    Raises RequestError: no run has a figure yet; runs of different code, images, node models or units are mixed; or the
    target is not an efficiency.
    """
    if runs["series"].n_unique() > 1:
        raise RequestError(
            "the study has several series, which are no sizes of one another",
            hint="hpcjobs report scaling NAME shows each series, and up to which size it is efficient",
        )
    if not 0 < target < 1:
        raise RequestError(
            f"a target efficiency of {target:g} is not allowed", hint="a share between 0 and 1: 0.8 is 80 %"
        )
    sound = runs.filter(pl.col("throughput").is_finite() & (pl.col("throughput") > 0))
    rest = runs.filter(~pl.col("job_id").is_in(sound["job_id"].to_list()))
    left_out = [
        f"job {r['job_id']}: {', '.join(filter(None, (r['state'] or 'not known', r['problem'])))}"
        for r in rest.to_dicts()
    ]
    if sound.is_empty():
        advice = ["--metric 'tokens/s (\\S+)' of hpcjobs scale reads a figure that the program prints"]
        without = advice if "COMPLETED" in rest["state"].to_list() and rest["problem"].is_null().all() else []
        hint = "; ".join([*left_out[:5], *without])
        raise RequestError("no run of the study has ended with a figure yet", hint=hint or None)
    if sound["unit"].n_unique() > 1:
        raise RequestError(
            f"the runs have throughputs in different units: {', '.join(sorted(set(sound['unit'])))}",
            hint="some runs left a summary.json and others did not: measure them anew under another --name",
        )
    mixed = find_mixtures(sound)
    if mixed and not allow_mixed:
        raise RequestError(
            f"the study mixes {'; '.join(mixed)}", hint="measure it anew, or --allow-mixed, which says so in the report"
        )
    per = "nodes" if sound["ntasks_per_node"].n_unique() == 1 else "ranks"
    sound = sound.with_columns(pl.Series("_rounding", map(rounding_variance, sound.iter_rows(named=True)), pl.Float64))
    sizes = sound.sort(per, "nodes").partition_by("nodes", "ntasks_per_node", maintain_order=True)
    by_size = RunGroups(
        [part["throughput"].to_list() for part in sizes], [sum(part["_rounding"]) / len(part) for part in sizes]
    )
    groups = [_group(part, per, sizes[0], by_size.mean(i), by_size.ratio(i, 0)) for i, part in enumerate(sizes)]
    n, x = [float(v) for v in sound[per]], [float(v) for v in sound["throughput"]]
    shapes = [f"{group.nodes}x{group.ranks // group.nodes}" for group in groups]
    fits: list[Fit] = []
    possible: list[Fit] = []
    chosen = None
    if len({group.n for group in groups}) < len(groups):
        same = f"Sizes ({', '.join(shapes)}) have the same number of ranks on different nodes"
        reasons = [f"{same}: no law of ranks is fitted."]
    elif len(groups) < 3:
        reasons = [f"{count_of(len(groups), 'sizes')}: too few to tell a law; measure at least three."]
    else:
        every = [fitted for law in LAWS if (fitted := fit(law, n, x, sound["_rounding"].to_list())) is not None]
        # A contention above 1 would mean that two are slower than one.
        fits = [one for one in every if max(one.parameters.get(name, 0.0) for name in ("serial", "sigma")) <= 1]
        nothing = "no law can be excluded and nothing is predicted"
        if any(group.runs == 1 for group in groups):
            reasons = [f"A size with a single run: {nothing}. Repeat every size."]
        elif by_size.mean(0).low is None:
            reasons = [f"The runs of each size have the same figure, so their scatter is not known: {nothing}."]
        else:
            possible = find_possible(fits)
            chosen, reasons = choose(possible, fits)
    falls = _describe_fall(groups, by_size, per, unit=str(sound["unit"][0]))
    if falls:
        reasons.insert(0, falls)
    knee = _knee(groups, [] if falls else possible, target)
    doubling = None if falls or not possible else _predict(possible, groups)
    summary = [*reasons, *_outlook(knee, doubling, groups, per, unit=str(sound["unit"][0]))]
    return Analysis(
        str(sound["unit"][0]), per, groups, fits, possible, chosen, summary, knee, doubling, mixed, left_out, by_size
    )  # fmt: skip


def analyse_series(runs: pl.DataFrame, *, target: float = 0.8, allow_mixed: bool = False) -> dict[str, Analysis]:
    """An analysis of each series by its name, in the order of the runs; one without name for a study without axes.

    Raises RequestError: as `analyse`.
    """
    names = runs["series"].unique(maintain_order=True).to_list() or [""]
    of_series = {name: runs if len(names) == 1 else runs.filter(pl.col("series") == name) for name in names}
    return {name: analyse(part, target=target, allow_mixed=allow_mixed) for name, part in of_series.items()}


def _describe_fall(groups: list[SizeResult], by_size: RunGroups, per: str, *, unit: str) -> str | None:
    """That the largest size is slower than a smaller one, and whether that is known to be beyond the scatter."""
    best, last = max(range(len(groups)), key=lambda i: groups[i].throughput.value), len(groups) - 1
    if groups[last].n == groups[best].n:
        return None
    values = [
        f"{format_number(groups[i].throughput.value)} {unit} with {count_of(groups[i].n, per)}" for i in (best, last)
    ]
    high = by_size.ratio(last, best).high
    if high is None:
        pace, doubt = "not faster", "; the scatter of the runs is not known"
    elif high >= 1:
        pace, doubt = "not faster", "; the difference is within the scatter of the runs"
    else:
        pace, doubt = "slower", ""
    return f"More {per} are {pace} here: {values[0]}, {values[1]}{doubt}. Nothing is predicted for more."


def _group(part: pl.DataFrame, per: str, base: pl.DataFrame, throughput: Interval, speedup: Interval) -> SizeResult:
    first = part.to_dicts()[0]
    n, smallest = int(first[per]), int(base[per][0])
    step, comm, wait = (_median(part, name) for name in ("step_s", "communication_s", "data_wait_s"))
    shares = [None if v is None or not step else min(1.0, max(0.0, v / step)) for v in (comm, wait)]
    paid = part.filter(pl.col("cost").is_not_null() & (pl.col("samples") > 0))
    return SizeResult(
        n=n,
        nodes=int(first["nodes"]),
        ranks=int(first["ranks"]),
        runs=len(part),
        measured=tuple(map(float, part["throughput"])),
        throughput=throughput,
        speedup=speedup,
        efficiency=speedup.scale_by(smallest / n),
        step_s=step,
        compute=_rest_of_step(shares, int(first["ranks"])),
        communication=shares[0],
        data_wait=shares[1],
        checkpoint=_median(part, "checkpoint_share"),
        cpu_efficiency=_median(part, "cpu_efficiency"),
        gpu_utilization=_median(part, "gpu_utilization"),
        queue_wait_s=_median(part, "queue_wait_s"),
        epoch_s=_median(part, "epoch_s"),
        energy_j=_median(part, "energy_j"),
        energy_source=part.select(joint_energy_source()).item(),
        cost_per_million=sum(paid["cost"]) / sum(paid["samples"]) * 1e6 if len(paid) else None,
        currency=first["currency"],
    )


def _rest_of_step(shares: list[float | None], ranks: int) -> float | None:
    """The share of a step without communication (0 of one rank) and data wait; None if one was not measured."""
    communication, data_wait = shares
    communication = 0.0 if ranks == 1 else communication
    return None if communication is None or data_wait is None else max(0.0, 1 - communication - data_wait)


def _median(part: pl.DataFrame, column: str) -> float | None:
    value: Any = part[column].median()
    return None if value is None else float(value)


def _knee(groups: list[SizeResult], possible: list[Fit], target: float) -> Knee:
    reached = find_reached(groups, target)
    measured = reached.n if reached else None
    if not possible:
        return Knee(target, measured, None, beyond=False)
    base, largest = groups[0].n, groups[-1].n
    fitted = _unite([one.knee(target, base=base, furthest=largest * _FURTHEST) for one in possible])
    return Knee(target, measured, fitted, beyond=fitted.value > largest)


def _predict(possible: list[Fit], groups: list[SizeResult]) -> Interval:
    """Throughput at twice the largest N, at most the linear one."""
    base, n = groups[0], 2 * groups[-1].n
    value, low, high = _unite([one.at(n) for one in possible])
    linear = (base.throughput.high or base.throughput.value) * n / base.n
    return Interval(min(value, linear), low, linear if high is None else min(high, linear))


def _unite(intervals: list[Interval]) -> Interval:
    """The value of the first one, and the bounds of all; ``high`` is None where one has none."""
    highs = [one.high for one in intervals if one.high is not None]
    return Interval(
        intervals[0].value,
        min(one.value if one.low is None else one.low for one in intervals),
        max(highs) if len(highs) == len(intervals) else None,
    )


def _outlook(knee: Knee, doubling: Interval | None, groups: list[SizeResult], per: str, *, unit: str) -> list[str]:
    largest = groups[-1].n
    bounded = [group.efficiency.low is not None for group in groups[1:]]
    if all(bounded):
        basis = "by the lower bounds of the 95 % intervals"
    elif any(bounded):
        basis = "by the lower bounds, of single runs by the values"
    else:
        basis = "by their values: their scatter is not known"
    up_to = count_of(knee.measured or 0, per)
    lines = [f"Efficiency of {knee.target:.0%} or more was measured up to {up_to} ({basis})."]
    if knee.fitted is not None:
        value, low, high = knee.fitted
        far = value >= largest * _FURTHEST
        bounds = "" if low is None else f"{low:.3g} to {high:.3g}" if high else f"{low:.3g} or more"
        reach = f" ({bounds} by the laws that are not excluded)" if bounds else ""
        beyond = f", which is an extrapolation beyond the {largest} measured" if knee.beyond else ""
        where = f"{largest * _FURTHEST} {per} or more" if far else f"at {value:.3g} {per}"
        lines.append(f"The knee of the law is {where}{reach}{beyond}.")
    if doubling is not None:
        value, low, high = doubling
        reach = "" if low is None or high is None else f"{low:,.0f} to {high:,.0f}, "
        lines.append(  # the interval is of the law: effects that the law leaves out are not in it
            f"Prediction for {2 * largest} {per}: {value:,.0f} {unit}"
            f" ({reach}if the law holds beyond what was measured)."
        )
    return lines
