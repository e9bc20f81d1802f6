"""Tells the job script that would restart a run its steps done, steps saved, and how early to signal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from hpcjobs.runtime import signals
from hpcjobs.runtime.summary import Quantiles

MARGIN_S = 20.0
"""For the way of a signal to the last rank, and of the job back into the queue."""
KILL_WAIT_S = 5.0
"""Before the deadline: nothing that is begun later is sure to be written."""


class JobControl:
    """One rank's side of the control directory. Does nothing without ``stop``: the run would not be started again."""

    def __init__(self, stop: signals.Stop | None, *, rank: int) -> None:
        self.stop = stop
        place = signals.control_dir() if stop is not None and rank == 0 else None
        self._steps: int | None = None
        if place is not None:
            with suppress(OSError):  # as below
                self._steps = os.open(place / signals.STEPS, os.O_WRONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        if self._steps is not None:
            os.close(self._steps)
            self._steps = None

    def record_step(self, step: int) -> None:
        """So far training has come; what of it is lost is known after the end, whatever that was."""
        if self._steps is not None:
            try:
                os.pwrite(self._steps, b"%-12d\n" % step, 0)
            except OSError:  # the checkpoints report storage that fails; this number is for the history alone
                os.close(self._steps)
                self._steps = None

    def record_saved_step(self, step: int) -> None:
        """So far it is on disk. Called by rank 0, from the thread that writes."""
        if self.stop is not None:
            with suppress(OSError):  # the checkpoint itself is on disk, and the next one is recorded again
                signals.record_progress(step)

    def publish_times(self, step_s: Sequence[float], write_s: Sequence[float]) -> None:
        """How long before the time limit this run needs its signal, from its own times; on rank 0."""
        step, write = Quantiles.of(step_s), Quantiles.of(write_s)
        if self.stop is not None and step is not None and write is not None:
            with suppress(OSError):  # the checkpoints report storage that fails; the script keeps what it knew
                signals.write_number(signals.SIGNAL_BEFORE, math.ceil(2 * step.p95 + write.p95 + MARGIN_S))

    @property
    def left_s(self) -> float:
        """Seconds until nothing can be saved any more, by the time limit as it is now."""
        deadline = None if self.stop is None else signals.read_deadline()
        return math.inf if deadline is None else deadline - KILL_WAIT_S - time.time()
