"""Tracks how long a job still has, by this host's monotonic clock: clocks of two hosts are never compared."""

import math
from typing import Callable, NamedTuple, Optional


class Limit(NamedTuple):
    """What the scheduler says of a job's time limit."""

    left_s: float
    """Until the limit, when it was read; infinity: there is none."""
    total_s: float


class Clock:
    """The time a job has left, between two answers of the scheduler."""

    def __init__(self, monotonic: Callable[[], float], limit: Optional[Limit]) -> None:
        self._monotonic = monotonic
        self._end, self.total_s = math.inf, math.inf
        self.update(limit)

    def update(self, limit: Optional[Limit]) -> None:
        """Take a new answer; None: there was none, and the one before remains valid."""
        if limit is not None:
            self._end, self.total_s = self._monotonic() + limit.left_s, limit.total_s

    @property
    def left_s(self) -> float:
        return self._end - self._monotonic()


def signal_time_s(*, fixed_s: Optional[int], measured_s: int, total_s: float, warning_s: int) -> float:
    """How long before the limit the program gets its signal.

    As the user wants it, else as the program measured it, else a quarter of the limit, at most ``warning_s``.
    """
    if fixed_s is not None:
        return fixed_s
    return measured_s or min(total_s / 4, warning_s)
