"""Everything about the course of a run that follows from flags, workload and world; settled once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcjobs.runtime.exits import BadData
from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.workloads.base import Workload

DECAYED = 0.1  # of the full rate is left at the end of a cosine


@dataclass(frozen=True)
class Plan:
    world_size: int
    batch_size: int  # per rank and forward pass
    accumulate: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    lr: float  # after scaling with the world size
    warmup_steps: int
    lr_decay: str

    @property
    def samples_per_step(self) -> int:
        """Of one rank."""
        return self.batch_size * self.accumulate

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_step * self.world_size

    def lr_at(self, step: int) -> float:
        """The rate of step 0, 1, …: a function of the number alone, so a resumed run needs no more."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.lr_decay == "none":
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.total_steps - 1 - self.warmup_steps)
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (DECAYED + (1 - DECAYED) * wave)


def plan_training(config: Config, workload: Workload, world_size: int) -> Plan:
    if len(workload.train) == 0:
        raise BadData(f"the workload {workload.name} has no training samples")
    batch_size = workload.batch_size if config.batch_size is None else config.batch_size
    per_rank = math.ceil(len(workload.train) / world_size)
    steps_per_epoch = math.ceil(per_rank / (batch_size * config.accumulate))
    epochs, steps = _length(config, workload, steps_per_epoch)
    return Plan(
        world_size=world_size,
        batch_size=batch_size,
        accumulate=config.accumulate,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=steps,
        lr=_scaled(workload.lr if config.lr is None else config.lr, config.lr_scaling, world_size),
        warmup_steps=config.warmup_steps,
        lr_decay=config.lr_decay,
    )


def _length(config: Config, workload: Workload, steps_per_epoch: int) -> tuple[int, int]:
    """Epochs and steps; whichever limit was given ends the run, and the nearer one if both were."""
    if config.steps is not None and config.epochs is None:
        return math.ceil(config.steps / steps_per_epoch), config.steps
    epochs = workload.epochs if config.epochs is None else config.epochs
    steps = epochs * steps_per_epoch
    return epochs, steps if config.steps is None else min(steps, config.steps)


def _scaled(lr: float, rule: str, world_size: int) -> float:
    return lr * {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[rule]
