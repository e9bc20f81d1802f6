"""Measures how long a step waits for gradients of other ranks, in passes that do not train.

A window is one forward and backward pass over the batch just trained on, from a common start of all ranks.
Windows come in pairs, one that synchronises gradients and one that does not, in alternating order;
exposed communication is the difference. Gradients of a window are dropped, and buffers (such as BatchNorm's) and
random generators are restored, so the measurement does not change training.
A pass without communication needs complete weights: if weights are sharded, windows run only if all ranks have
the memory.
A negative value is noise, and is kept as such.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import torch

from hpcjobs.trainers.checkpoint.state import own_generators, set_own_generators
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.workloads.base import Batch

FIRST_STEP = 10  # warmed up, and soon enough for short runs
SPARE = 0.1  # of the free memory that stays free: allocators divide it into pieces


class Probe:
    """Measures how long a step waits for communication, after FIRST_STEP and every `every` steps; None: never."""

    def __init__(self, every: int | None, stepper: Stepper, group: RankGroup) -> None:
        able = stepper.strategy.quiet_passes and group.world_size > 1
        self.every = every if able else None
        self.stepper, self.group = stepper, group
        self.exposed_s: list[float] = []
        self.compute_s: list[float] = []
        """Of passes without communication, which wait for no other rank: differences between ranks show here."""

    def due(self, step: int) -> bool:
        return self.every is not None and (step == FIRST_STEP or step % self.every == 0)

    def measure(self, batch: Batch) -> None:
        """Run one pair of windows if all ranks have the memory; a collective call."""
        if not self.fits():
            self.every = None
            return
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

    def fits(self) -> bool:
        """Whether every rank has the memory of a pass without communication; a collective call where one needs more."""
        stepper, group = self.stepper, self.group
        needed = stepper.strategy.quiet_pass_bytes(stepper.model)
        if needed == 0:
            return True
        short = needed - (1 - SPARE) * measure_free_bytes(group.device, group.env.local_world_size)
        most = float(group.max(torch.tensor(short, dtype=torch.float64, device=group.device)))
        if most > 0:
            group.log(
                f"exposed communication is not measured: complete weights and gradients are {needed / 1e9:.1f} GB, "
                f"{most / 1e9:.1f} GB more than a rank has free"
            )
        return most <= 0

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


def measure_free_bytes(device: torch.device, local_world_size: int, *, cuda: Any = torch.cuda) -> float:
    """Return the bytes that this rank could allocate: on a GPU beyond its peak, on a CPU its share of the memory."""
    if device.type == "cuda":
        unused, _ = cuda.mem_get_info(device)
        return float(unused + cuda.memory_reserved(device) - cuda.max_memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local_world_size
