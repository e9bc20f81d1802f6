"""Compares two runs of one program, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcjobs.record.metrics import decode_step, read_lines
from hpcjobs.record.names import METRICS

ROUNDING = 1e-12
"""Of sums that were added up in another order."""


class Losses(NamedTuple):
    """How far two runs agree: steps that both tell of, and the largest relative difference of a loss."""

    steps: int
    difference: float


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> mean loss of the steps since the line before."""
    path = run_dir / METRICS
    steps = map(decode_step, read_lines(path)) if path.exists() else ()
    return {step.step: step.loss for step in steps if step is not None and step.loss is not None}


def sums(by_step: dict[int, float]) -> dict[int, float]:
    """Step -> sum of all losses up to it: a run that was stopped has a line more, over fewer steps each."""
    sums, total, before = {}, 0.0, 0
    for step, mean in sorted(by_step.items()):
        total += mean * (step - before)
        sums[step], before = total, step
    return sums


def compare(one: Path, other: Path) -> Losses:
    """Losses where both runs have the same lines, else their sums up to the same step."""
    first, second = losses(one), losses(other)
    rounding = 0.0
    if first.keys() != second.keys():
        first, second, rounding = sums(first), sums(second), ROUNDING
    both = sorted(first.keys() & second.keys())
    worst = max((abs(first[s] - second[s]) / max(abs(first[s]), 1e-30) for s in both), default=float("inf"))
    return Losses(len(both), worst if worst > rounding else 0.0)
