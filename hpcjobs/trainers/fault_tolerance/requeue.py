"""Between a run and the job script that would start it again: who asks whom to stop, and who is told what."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from hpcjobs.runtime import signals
from hpcjobs.runtime.exits import Requeue
from hpcjobs.runtime.summary import Quantiles
from hpcjobs.trainers.distributed.process_group import RankGroup

NAMES = (None, "SIGUSR1", "SIGTERM")
MARGIN_S = 20.0
"""For the way of a signal to the last rank, and of the job back into the queue."""
KILL_WAIT_S = 5.0
"""Before the deadline: nothing that is begun later is sure to be written."""


class FaultTolerance:
    """One rank's side. Does nothing at all where no job script would start the run again."""

    def __init__(self, group: RankGroup, stop: signals.Stop | None) -> None:
        self.group, self._stop = group, stop
        self._flag = torch.zeros((), dtype=torch.int32)
        self._vote: dist.Work | None = None
        place = signals.control_dir() if stop is not None and group.rank == 0 else None
        self._steps = None if place is None else os.open(place / signals.STEPS, os.O_WRONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        if self._vote is not None:
            self._vote.wait()
        if self._steps is not None:
            os.close(self._steps)
            self._steps = None

    def agree_on_stop(self) -> str | None:
        """At every boundary, on every rank: the signal that some rank has got, the same answer for all.

        The answer is that to the question of the boundary before, so that nobody stands still for it.
        """
        if self._stop is None:
            return None
        if self.group.world_size == 1:
            return self._stop.requested
        signal_name = None
        if self._vote is not None:
            self._vote.wait()
            signal_name = NAMES[int(self._flag)]
        self._flag.fill_(NAMES.index(self._stop.requested))
        self._vote = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return signal_name

    def record_step(self, step: int) -> None:
        """So far training has come; what of it is lost is known after the end, whatever that was."""
        if self._steps is not None:
            try:
                os.pwrite(self._steps, b"%-12d\n" % step, 0)
            except OSError:  # storage that fails is the checkpoints' to tell; this number is for the history alone
                os.close(self._steps)
                self._steps = None

    def record_saved_step(self, step: int) -> None:
        """So far it is on disk. Called by rank 0, from the thread that writes."""
        if self._stop is not None:
            signals.record_progress(step)

    def publish_times(self, step_s: Sequence[float], write_s: Sequence[float]) -> None:
        """How long ahead of the time limit this run wants to be told, from its own times; on rank 0."""
        step, write = Quantiles.of(step_s), Quantiles.of(write_s)
        if self._stop is not None and step is not None and write is not None:
            with suppress(OSError):  # storage that fails is the checkpoints' to tell; the script keeps what it knew
                signals.write_number(signals.SIGNAL_BEFORE, math.ceil(2 * step.p95 + write.p95 + MARGIN_S))

    def request_requeue(self, step: int, why: str) -> None:
        """Everything is saved, on all ranks' behalf: ask to be started again."""
        self.group.barrier()
        if self.group.rank == 0:
            signals.request_requeue(step)
        self.group.log(f"stopped by {why} after step {step}, saved; asks to be started again")
        raise Requeue(f"stopped by {why} after step {step}")

    @property
    def left_s(self) -> float:
        """Seconds until nothing can be saved any more, by the time limit as it is now."""
        deadline = None if self._stop is None else signals.read_deadline()
        return math.inf if deadline is None else deadline - KILL_WAIT_S - time.time()
