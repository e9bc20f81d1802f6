"""How long a step waits for gradients of other ranks: measured, on passes whose gradients are thrown away.

A window is one forward and backward pass over the batch just trained on, from a common start of all ranks.
Windows come in pairs, one that synchronises gradients and one that does not, in alternating order;
exposed communication is the difference. What a pass leaves behind besides gradients, buffers such as
BatchNorm's and the random generators, is put back, so training goes on as if nothing had been measured.
A negative value is noise, and is kept as such.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from hpcjobs.trainers.checkpoint.state import own_generators, set_own_generators
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.workloads.base import Batch

FIRST_STEP = 10  # warmed up, and soon enough for short runs


class Probe:
    def __init__(self, every: int | None, stepper: Stepper, group: RankGroup) -> None:
        able = stepper.strategy.quiet_passes and group.world_size > 1
        self.every = every if able else None
        self.stepper, self.group = stepper, group
        self.exposed_s: list[float] = []
        self.compute_s: list[float] = []
        """Of passes without communication, which wait for nobody: where ranks differ, it shows here."""

    def due(self, step: int) -> bool:
        return self.every is not None and (step == FIRST_STEP or step % self.every == 0)

    def measure(self, batch: Batch) -> None:
        """One pair of windows."""
        generators = own_generators(self.group)
        buffers = [(buffer, buffer.clone()) for buffer in self.stepper.model.buffers()]
        order = (True, False) if len(self.exposed_s) % 2 else (False, True)
        window_s = {sync: self._window(batch, sync=sync) for sync in order}
        for buffer, before in buffers:
            buffer.copy_(before)
        set_own_generators(generators, self.group)
        self.stepper.take_metrics()  # of passes that do not count
        self.exposed_s.append(window_s[True] - window_s[False])
        self.compute_s.append(window_s[False])

    def _window(self, batch: Batch, *, sync: bool) -> float:
        stepper = self.stepper
        with nullcontext() if sync else stepper.strategy.quiet(stepper.model):
            self._await_all()
            began = time.perf_counter()
            stepper.backward(batch)
            if sync:
                stepper.strategy.after_backward(stepper.model)
            self._await_device()
            took = time.perf_counter() - began
        stepper.strategy.zero_grad(stepper.optimizer)
        return took

    def _await_all(self) -> None:
        self._await_device()
        self.group.barrier()

    def _await_device(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
