"""The messages between a run and the job script that would start it again: requests to stop, and the answers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcjobs.runtime import signals
from hpcjobs.runtime.exits import Requeue
from hpcjobs.runtime.job_control import JobControl
from hpcjobs.trainers.distributed.process_group import RankGroup

NAMES = (None, "SIGUSR1", "SIGTERM")


class FaultTolerance(JobControl):
    """One rank's side. Does nothing at all where no job script would start the run again."""

    def __init__(self, group: RankGroup, stop: signals.Stop | None) -> None:
        super().__init__(stop, rank=group.rank)
        self.group = group
        self._flag = torch.zeros((), dtype=torch.int32)
        self._vote: dist.Work | None = None

    def close(self) -> None:
        if self._vote is not None:
            self._vote.wait()
        super().close()

    def agree_on_stop(self) -> str | None:
        """At every boundary, on every rank: the signal that some rank has got, the same answer for all.

        The answer is the one to the previous boundary's question, so that no rank waits for it.
        """
        if self.stop is None:
            return None
        if self.group.world_size == 1:
            return self.stop.requested
        signal_name = None
        if self._vote is not None:
            self._vote.wait()
            signal_name = NAMES[int(self._flag)]
        self._flag.fill_(NAMES.index(self.stop.requested))
        self._vote = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return signal_name

    def request_requeue(self, step: int, why: str) -> None:
        """Everything is saved, on all ranks' behalf: ask to be started again."""
        self.group.barrier()
        if self.group.rank == 0:
            signals.request_requeue(step)
        self.group.log(f"stopped by {why} after step {step}, saved; asks to be started again")
        raise Requeue(f"stopped by {why} after step {step}")
