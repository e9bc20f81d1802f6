"""Learning-rate schedules: from a step and the number of steps, both after the warm-up, to a factor of the rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from hpcjobs.trainers.workloads.base import Schedule

WSD_DECAY_SHARE = 0.2  # of the steps, at the end; 0.1 to 0.2 serve (Hu et al. 2024, Hägele et al. 2024)


def constant(step: int, steps: int, *, final: float) -> float:
    return 1.0


def cosine(step: int, steps: int, *, final: float) -> float:
    """Half a wave from 1 at the first step to `final` at the last one."""
    wave = 0.5 * (1 + math.cos(math.pi * _progress(step, steps)))
    return final + (1 - final) * wave


def linear(step: int, steps: int, *, final: float) -> float:
    return 1 - (1 - final) * _progress(step, steps)


def wsd(step: int, steps: int, *, final: float) -> float:
    """Warm-up, stable, decay: constant, then linear to `final` over the last WSD_DECAY_SHARE of the steps."""
    first = steps - max(1, round(WSD_DECAY_SHARE * steps))
    return 1.0 if step < first else 1 - (1 - final) * (step + 1 - first) / (steps - first)


def _progress(step: int, steps: int) -> float:
    return min(1.0, step / max(1, steps - 1))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "linear": linear, "wsd": wsd}


def make_schedule(name: str, *, final: float) -> Schedule:
    return partial(SCHEDULES[name], final=final)
