"""Decides how large the next run should be, from measured sizes: for ``submit -N auto`` and ``report advise`` alike.

A decision is a size, or the trial that is missing for one: nothing is read, asked or submitted for it. The answer of
``submit -N auto`` has its file, its lines for people, and its place in the request.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from hpcjobs.files import write_beside
from hpcjobs.job.models import JobSpec, Layer, Plan
from hpcjobs.record import METRICS, SIZE
from hpcjobs.runtime.checkpoints import FOLDER as CHECKPOINTS
from hpcjobs.site.models import Frozen, Resources
from hpcjobs.units import format_count, format_number, human_duration

if TYPE_CHECKING:
    from hpcjobs.scaling.fits import Interval

PER: Final = {"nodes": "nodes", "ntasks_per_node": "tasks per node", "cpus_per_task": "CPUs per task"}
Value = int | str


class SizeRow(Frozen, frozen=True):
    """The measurements of one size."""

    option: str
    value: str
    runs: int
    throughput: float
    throughput_low: float | None
    throughput_high: float | None
    efficiency: float
    """Against the smallest size; 0 of launchers."""
    efficiency_low: float | None
    efficiency_high: float | None


class SizeAnswer(Frozen, frozen=True):
    """The size of a run, and why: ``size.json`` of its run folder."""

    options: dict[str, str]
    reasons: list[str]
    unit: str
    sizes: list[SizeRow]
    trials: list[str]
    """Jobs that measured it."""
    earlier_runs: list[str]
    cost_node_s: float
    """Cost of the trials in node-seconds."""
    budget_node_s: float | None
    resumes_from: str | None = None
    """Run folder of the trial that the run continues."""
    next_trial: str | None = None
    """The next trial, not submitted; None: the answer is complete."""

    @property
    def source(self) -> str:
        return f"auto: {'; '.join(self.reasons)}"

    @property
    def values(self) -> dict[str, Value]:
        """The options with counts as numbers."""
        return {axis: value if axis == "launcher" else int(value) for axis, value in self.options.items()}


def count_of(n: int, per: str) -> str:
    """``1 node``, ``2 tasks per node``."""
    noun, space, rest = per.partition(" ")
    return f"{n} {noun.removesuffix('s') if n == 1 else noun}{space}{rest}"


def describe(options: Mapping[str, Value]) -> str:
    """``4 nodes, 2 tasks per node``."""
    return ", ".join(
        count_of(value, PER[axis]) if isinstance(value, int) else f"{axis} {value}" for axis, value in options.items()
    )


def remember(answer: SizeAnswer) -> Callable[[Plan], None]:
    """Return a function that copies the answer and the trial's checkpoints into the run folder before submission."""

    def prepare(plan: Plan) -> None:
        write_beside(plan.run_dir / SIZE, msgspec.json.format(msgspec.json.encode(answer), indent=1))
        if answer.resumes_from is not None:
            trial = Path(answer.resumes_from)
            shutil.copytree(trial / CHECKPOINTS, plan.run_dir / CHECKPOINTS, copy_function=_link, symlinks=True)
            if (trial / METRICS).exists():
                shutil.copy2(trial / METRICS, plan.run_dir / METRICS)

    return prepare


def _link(source: str, target: str) -> None:
    """The same file under another name, where the file system can; a checkpoint is written once and never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def layer_of(answer: SizeAnswer) -> Layer:
    """The answer as a layer of the request."""
    options: dict[str, Any] = {axis: value for axis, value in answer.values.items() if axis != "launcher"}
    spec = JobSpec(resources=Resources(**options), launcher=answer.options.get("launcher"))
    return Layer(answer.source, spec)


def describe_answer(answer: SizeAnswer) -> list[str]:
    """The answer, its reasons and its cost, line by line."""
    lines = list(map(_describe_row, answer.sizes, itertools.repeat(answer.unit)))
    if answer.next_trial is not None:
        following = f"would try next: {answer.next_trial}; then what these show to be missing, within the budget"
        return [*lines, *answer.reasons, following]
    lines.append(f"chosen: {describe(answer.values)}: {'; '.join(answer.reasons)}")
    if answer.trials:
        allowed = "" if answer.budget_node_s is None else f"; the budget was {human_duration(answer.budget_node_s)}"
        count = format_count(len(answer.trials), "trial")
        lines.append(f"cost in all: {count}, {human_duration(answer.cost_node_s)} of one node{allowed}")
    if answer.earlier_runs:
        count = format_count(len(answer.earlier_runs), "earlier run")
        lines.append(f"{count} counted: {', '.join(answer.earlier_runs)}")
    if answer.resumes_from is not None:
        lines.append(f"continues from the checkpoints of {answer.resumes_from}")
    return lines


def _describe_row(row: SizeRow, unit: str) -> str:
    name = row.value if row.option == "launcher" else count_of(int(row.value), PER[row.option])
    text = f"{name}: {format_number(row.throughput)} {unit}".rstrip()
    if row.throughput_low is not None and row.throughput_high is not None:
        text += f" ({format_number(row.throughput_low)} to {format_number(row.throughput_high)})"
    if row.efficiency_low is not None and row.efficiency_high is not None:
        text += f", {row.efficiency:.0%} efficient ({row.efficiency_low:.0%} to {row.efficiency_high:.0%})"
    return f"{text}, {format_count(row.runs, 'run')}"


REPEATS: Final = 3
"""Runs of a size that is measured: fewer have hardly an interval."""
MOST_REPEATS: Final = 12
"""At most this many runs of a size with the target inside its interval; then the lower bound decides."""


_ALIKE: Final = 1.05
"""Costs that differ by less are alike, and the smaller size is taken."""


class Sized(Protocol):
    """A size with its efficiency."""

    @property
    def n(self) -> int: ...
    @property
    def efficiency(self) -> Interval: ...


S = TypeVar("S", bound=Sized)


class MeasuredSize(NamedTuple):
    """All runs of one size."""

    n: int
    throughput: Interval
    efficiency: Interval
    """Against the smallest size measured."""
    runs: int
    duration_s: float | None
    """Longest duration of a complete run; None: not known."""


class MissingRuns(NamedTuple):
    """Runs that are missing for a decision."""

    n: int
    runs: int
    at_least: int
    """The answer will be no smaller than this."""
    best: int | None
    """The answer without these runs; None: not known yet."""


class SizeChoice(NamedTuple):
    """The decision; ``n`` None: no size will do."""

    n: int | None
    reason: str


class Measurement(Protocol):
    """One measurement of a size."""

    @property
    def throughput(self) -> float | None: ...
    @property
    def duration_s(self) -> float | None: ...


def measure_sizes(runs: Mapping[int, Sequence[Measurement]]) -> list[MeasuredSize]:
    """Means and efficiencies with their 95 % intervals, smallest size first; every run has a throughput."""
    from hpcjobs.scaling.fits import RunGroups  # needs scipy, and other submissions have no size to choose

    by_size = RunGroups([[run.throughput or 0.0 for run in runs[n]] for n in sorted(runs)])
    sizes = []
    for group, n in enumerate(sorted(runs)):
        ratio = by_size.ratio(group, 0).scale_by(min(runs) / n)
        duration_s = max((run.duration_s for run in runs[n] if run.duration_s is not None), default=None)
        sizes.append(MeasuredSize(n, by_size.mean(group), ratio, len(runs[n]), duration_s))
    return sizes


def find_reached(sizes: Iterable[S], target: float) -> S | None:
    """The largest size that, as every smaller N, has an efficiency of at least ``target`` by the lower bound of its
    interval (by its value where it has none)."""
    reached = None
    for _, alike in itertools.groupby(sorted(sizes, key=lambda size: size.n), key=lambda size: size.n):
        here = [size for size in alike if _reaches(size.efficiency, target)]
        if not here:
            break
        reached = max(here, key=lambda size: size.efficiency.value)
    return reached


def _reaches(efficiency: Interval, target: float) -> bool:
    from hpcjobs.scaling.fits import reaches

    return reaches(efficiency.value if efficiency.low is None else efficiency.low, target)


def describe_reached(reached: Sized, sizes: Iterable[Sized], per: str) -> str:
    """``96% efficient at 4 nodes (at least 94%), 71% at 8``."""
    value, low, _ = reached.efficiency
    text = f"{value:.0%} efficient at {count_of(reached.n, per)}" + ("" if low is None else f" (at least {low:.0%})")
    later = next((size for size in sizes if size.n > reached.n), None)
    return text if later is None else f"{text}, {later.efficiency.value:.0%} at {later.n}"


def choose_by_efficiency(
    sizes: Sequence[MeasuredSize], *, smallest: int, largest: int, target: float, per: str
) -> MissingRuns | SizeChoice:
    """The largest size with an efficiency of at least ``target`` by its lower bound.

    Sizes grow twofold while they reach it; between the last that does and the first that does not, the middle is next.
    """
    if smallest == largest:
        return SizeChoice(smallest, f"{count_of(smallest, per)} is the only size possible")
    base = sizes[0] if sizes and sizes[0].n == smallest else None
    if base is None or base.runs < REPEATS:
        return MissingRuns(smallest, REPEATS - (base.runs if base else 0), smallest, smallest)
    sizes = [size for size in sizes if size.n <= largest]
    good = find_reached(sizes, target) or base
    short = next((size for size in sizes if size.n > good.n), None) or (good if good.runs < REPEATS else None)
    if short is None:
        if good.n == largest:
            return SizeChoice(good.n, f"{describe_reached(good, sizes, per)}; more are not allowed")
        return MissingRuns(min(2 * good.n, largest), REPEATS, good.n, good.n)
    least = smallest if good is short else good.n
    if short.runs < REPEATS:
        return MissingRuns(short.n, REPEATS - short.runs, least, least)
    value, low, high = short.efficiency
    fewest = min((base, short), key=lambda size: size.runs)
    if (low or 0) < target <= (high or value) and fewest.runs < MOST_REPEATS:
        return MissingRuns(fewest.n, min(fewest.runs, MOST_REPEATS - fewest.runs), good.n, good.n)
    if short.n - good.n > 1:
        return MissingRuns((good.n + short.n) // 2, REPEATS, good.n, good.n)
    return SizeChoice(good.n, describe_reached(good, sizes, per))


def choose_by_end(
    sizes: Sequence[MeasuredSize],
    *,
    smallest: int,
    largest: int,
    finish_by: float,
    end: Callable[[MeasuredSize], float],
    per: str,
) -> MissingRuns | SizeChoice:
    """The cheapest size that ends before ``finish_by``; ``end`` estimates when a run of a size would end."""
    sizes = [size for size in sizes if size.n <= largest]
    if not sizes or sizes[0].n > smallest or sizes[0].runs < REPEATS:
        known = sizes[0].runs if sizes and sizes[0].n == smallest else 0
        return MissingRuns(smallest, REPEATS - known, smallest, None)
    if (few := next((size for size in sizes if size.runs < REPEATS), None)) is not None:
        return MissingRuns(few.n, REPEATS - few.runs, smallest, None)
    top = sizes[-1]
    in_time = [size for size in sizes if end(size) <= finish_by]
    if not in_time:
        start_is_late_s = min(end(size) - (size.duration_s or 0.0) for size in sizes) - finish_by
        if start_is_late_s > 0:
            wait = f"the queue starts {count_of(sizes[0].n, per)} {human_duration(start_is_late_s)} after that time"
            return SizeChoice(None, f"no size ends in time: {wait}")
        slower = len(sizes) > 1 and top.throughput.value <= sizes[-2].throughput.value
        if top.n == largest or slower:
            best = min(sizes, key=end)
            more = f"more {per} are not faster" if slower else "more are not allowed"
            late_s = end(best) - finish_by
            return SizeChoice(
                None, f"no size ends in time: {count_of(best.n, per)} would end {human_duration(late_s)} late; {more}"
            )
        return MissingRuns(min(2 * top.n, largest), REPEATS, top.n, None)
    costs = {size.n: size.n * (size.duration_s or 0.0) for size in in_time}
    cheapest = next(size for size in in_time if costs[size.n] <= min(costs.values()) * _ALIKE)
    late = max((size.n for size in sizes if size.n < cheapest.n and size not in in_time), default=cheapest.n - 1)
    if cheapest.n - late > 1 and not any(late < size.n < cheapest.n for size in sizes):
        return MissingRuns((late + cheapest.n) // 2, REPEATS, late, cheapest.n)
    spare_s = finish_by - end(cheapest)
    return SizeChoice(
        cheapest.n,
        f"the cheapest that ends in time: {count_of(cheapest.n, per)}, {human_duration(spare_s)} before the time",
    )


def choose_fastest(sizes: Sequence[MeasuredSize], names: Sequence[str]) -> MissingRuns | SizeChoice:
    """The alternative with the highest throughput; they are numbered from 1."""
    runs = {size.n: size.runs for size in sizes}
    for n in range(1, len(names) + 1):
        if len(names) > 1 and runs.get(n, 0) < REPEATS:
            return MissingRuns(n, REPEATS - runs.get(n, 0), 1, 1)
    best = max(sizes, key=lambda size: size.throughput.value).n if len(names) > 1 else 1
    return SizeChoice(best, f"{names[best - 1]} is the fastest of {', '.join(names)}")
