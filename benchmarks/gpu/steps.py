"""A step of the proof, and how steps run: each is reported, and a failure ends none of the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpu.bench import Bench, OutOfTime

Figures = Mapping[str, Any]
"""What a step measured, as JSON has it."""
Verdict = Literal["passed", "failed", "not run"]


class CannotRun(Exception):
    """What this machine lacks for a step."""


@dataclass(frozen=True)
class Step:
    """`run` measures; `check` names what is wrong with the figures, and nothing where they are as they should be."""

    name: str
    about: str
    run: Callable[[Bench], Figures]
    check: Callable[[Figures], Iterable[str]]


@dataclass(frozen=True)
class Outcome:
    """The verdict on one step, with its figures and problems."""

    name: str
    about: str
    verdict: Verdict
    seconds: float
    figures: Figures = field(default_factory=dict)
    problems: Sequence[str] = ()


def run_step(step: Step, bench: Bench) -> Outcome:
    """Run and judge one step. Whatever it raises is its failure, or the reason why it cannot run here."""
    began = time.perf_counter()
    if bench.left_s <= 0:
        return Outcome(step.name, step.about, "not run", 0.0, problems=[f"the {bench.minutes:g} minutes are over"])
    try:
        figures = step.run(bench)
        problems = list(step.check(figures))
    except (CannotRun, OutOfTime) as lack:
        return Outcome(step.name, step.about, "not run", time.perf_counter() - began, problems=[str(lack)])
    except Exception as error:  # a defect of one step must not hide what the others show
        text = "".join(traceback.format_exception_only(error)).strip()
        traceback.print_exc()
        return Outcome(step.name, step.about, "failed", time.perf_counter() - began, problems=[text])
    verdict: Verdict = "failed" if problems else "passed"
    return Outcome(step.name, step.about, verdict, time.perf_counter() - began, figures, problems)
