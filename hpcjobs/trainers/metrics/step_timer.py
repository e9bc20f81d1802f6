"""Time per step and wait for data. On a GPU the steps are timed by its own events, read in batches,
because a step's call returns long before the work is done."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

WARMUP_STEPS = 2  # not counted: lazy allocations, and DDP rebuilds its buckets after the first step
WINDOW_STEPS = 1000  # what is judged while a run goes on: its cost must not grow with the length of the run


def _seconds() -> array[float]:
    return array("d")


@dataclass
class Meter:
    """Call `begin`, `data_ready`, `end` once per step."""

    device: torch.device
    step_s: array[float] = field(default_factory=_seconds)
    wait_s: array[float] = field(default_factory=_seconds)
    _began: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        self._began = time.perf_counter()
        if self.device.type == "cuda":
            start, end = _event(), _event()
            start.record()
            self._events.append((start, end))

    def data_ready(self) -> None:
        self.wait_s.append(time.perf_counter() - self._began)

    def end(self) -> None:
        if self.device.type == "cuda":
            self._events[-1][1].record()
        else:
            self.step_s.append(time.perf_counter() - self._began)

    def read_gpu_times(self) -> None:
        """Read what a GPU still owes; waits for it."""
        if self._events:
            torch.cuda.synchronize(self.device)
            self.step_s.extend(start.elapsed_time(end) / 1e3 for start, end in self._events)
            self._events.clear()

    @property
    def recent_steps(self) -> Sequence[float]:
        """The newest steady steps, at most WINDOW_STEPS of them."""
        count = len(self.step_s)
        return self.step_s[max(WARMUP_STEPS if count > WARMUP_STEPS else 0, count - WINDOW_STEPS) :]

    @property
    def counted_steps(self) -> Sequence[float]:
        """Steady steps: the first few only where nothing else was measured."""
        return self.step_s[WARMUP_STEPS:] or self.step_s

    @property
    def counted_waits(self) -> Sequence[float]:
        return self.wait_s[WARMUP_STEPS:] or self.wait_s


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
