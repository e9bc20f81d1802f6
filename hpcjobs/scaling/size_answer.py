"""The size that ``submit -N auto`` has found, and why: its file, its lines for people, its place in the request."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hpcjobs.files import write_beside
from hpcjobs.job.models import JobSpec, Layer, Plan
from hpcjobs.record.names import METRICS, SIZE
from hpcjobs.runtime.checkpoints import FOLDER as CHECKPOINTS
from hpcjobs.site.models import Frozen, Resources
from hpcjobs.units import format_count, format_number, human_duration

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
        return [
            *lines,
            *answer.reasons,
            f"would try next: {answer.next_trial}; then what these show to be missing, within the budget",
        ]
    lines.append(f"chosen: {describe(answer.values)}: {'; '.join(answer.reasons)}")
    if answer.trials:
        allowed = "" if answer.budget_node_s is None else f"; the budget was {human_duration(answer.budget_node_s)}"
        count = format_count(len(answer.trials), "trial")
        lines.append(f"cost in all: {count}, {human_duration(answer.cost_node_s)} of one node{allowed}")
    if answer.earlier_runs:
        lines.append(
            f"{format_count(len(answer.earlier_runs), 'earlier run')} counted: {', '.join(answer.earlier_runs)}"
        )
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
