"""The plan of a run: its steps, batch sizes and learning rate, resolved once from flags, workload and world size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.optimization.schedules import make_schedule
from hpcjobs.trainers.workloads.base import Schedule, Workload

WARMUP_SHARE = 0.1  # of a run's steps, where its rate is above the workload's own (Goyal et al. 2017)
SYNTHETIC_STEPS = 32  # of an epoch of synthetic data, at least: full batches whatever the world size


@dataclass(frozen=True)
class EpochPosition:
    """A place in the data: the samples of an epoch that all ranks have taken, at a step of that epoch."""

    epoch: int
    step: int
    samples: int


@dataclass(frozen=True)
class TrainingPlan:
    world_size: int
    batch_size: int  # per rank and forward pass
    accumulate: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    lr: float  # after scaling with the world size
    warmup_steps: int
    epoch_samples: int  # of the training data; of a stream without a length, all that the run takes
    fill: bool  # ranks repeat samples, so that each has as many
    schedule: Schedule
    resumed: EpochPosition | None = None

    def first_sample(self, epoch: int, step: int) -> int:
        """Samples of the epoch that all ranks have taken before its step `step`."""
        start = self.resumed
        if start is None or start.epoch != epoch:
            return min(step * self.global_batch_size, self.epoch_samples)
        return min(start.samples + (step - start.step) * self.global_batch_size, self.epoch_samples)

    def resume_at(self, epoch: int, samples: int) -> TrainingPlan:
        """The plan of a run that goes on after `samples` samples of an epoch, which another world may have taken.

        The position counts as the step of this plan after which as many steps are left as the rest of the epoch needs.
        """
        if samples >= self.epoch_samples:
            epoch, samples = epoch + 1, 0
        per_rank = math.ceil((self.epoch_samples - samples) / self.world_size)
        left = math.ceil(per_rank / self.samples_per_step)
        return replace(self, resumed=EpochPosition(epoch, self.steps_per_epoch - left, samples))

    @property
    def first_step(self) -> int:
        """Finished steps when this run starts."""
        if self.resumed is None:
            return 0
        return min(self.resumed.epoch * self.steps_per_epoch + self.resumed.step, self.total_steps)

    @property
    def samples_per_step(self) -> int:
        """The samples of one rank per step."""
        return self.batch_size * self.accumulate

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_step * self.world_size

    def samples_before(self, step: int) -> int:
        """Samples that all ranks take in the first `step` steps; the last batches of an epoch may be smaller."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self._in_epoch(self.steps_per_epoch) + self._in_epoch(steps)

    def _in_epoch(self, steps: int) -> int:
        """Of all ranks, in the first steps of an epoch: some ranks have one sample more where none is repeated."""
        share, extra = divmod(self.epoch_samples, self.world_size)
        most = steps * self.samples_per_step
        if self.fill and extra:
            extra = self.world_size
        return extra * min(most, share + 1) + (self.world_size - extra) * min(most, share)

    def lr_at(self, step: int) -> float:
        """The rate of step 0, 1, …: a function of the number alone, so a resumed run needs no more."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * self.schedule(step - self.warmup_steps, self.total_steps - self.warmup_steps)


def grow_synthetic(config: Config, workload: Workload, world_size: int) -> Workload:
    """The workload with synthetic data for SYNTHETIC_STEPS full steps at least; real data, and data whose length
    was given, stay as they are."""
    if workload.synthetic is None or config.train_samples is not None:
        return workload
    count = SYNTHETIC_STEPS * _batch_size(config, workload) * config.accumulate * world_size
    return workload if count <= len(workload.train) else replace(workload, train=workload.synthetic(count))


def choose_schedule(config: Config, workload: Workload) -> Schedule:
    """That of --lr-schedule, else the workload's own, else a constant rate."""
    if config.lr_schedule is None and workload.schedule is not None:
        return workload.schedule
    return make_schedule(config.lr_schedule or "constant", final=config.lr_final)


def plan_training(config: Config, workload: Workload, world_size: int, *, fill: bool = True) -> TrainingPlan:
    batch_size, length = _batch_size(config, workload), workload.train_length
    if length == 0:
        raise BadData(f"the workload {workload.name} has no training samples")
    if length is None:  # the run is one epoch
        if config.steps is None:
            raise UsageError(
                f"the training data of the workload {workload.name} has no length: --steps N says how long to train",
                hint="or the dataset defines __len__",
            )
        length = config.steps * batch_size * config.accumulate * world_size
    per_rank = math.ceil(length / world_size)
    steps_per_epoch = math.ceil(per_rank / (batch_size * config.accumulate))
    epochs, steps = _length(config, workload, steps_per_epoch)
    lr = _scale_lr(workload.lr if config.lr is None else config.lr, config.lr_scaling, world_size)
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = math.ceil(WARMUP_SHARE * steps) if lr > workload.lr else 0
    return TrainingPlan(
        world_size=world_size,
        batch_size=batch_size,
        accumulate=config.accumulate,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=steps,
        lr=lr,
        warmup_steps=warmup_steps,
        epoch_samples=length,
        fill=fill,
        schedule=choose_schedule(config, workload),
    )


def _batch_size(config: Config, workload: Workload) -> int:
    return workload.batch_size if config.batch_size is None else config.batch_size


def _length(config: Config, workload: Workload, steps_per_epoch: int) -> tuple[int, int]:
    """Epochs and steps; whichever limit was given ends the run, and the nearer one if both were."""
    if config.steps is not None and config.epochs is None:
        return math.ceil(config.steps / steps_per_epoch), config.steps
    epochs = workload.epochs if config.epochs is None else config.epochs
    steps = epochs * steps_per_epoch
    return epochs, steps if config.steps is None else min(steps, config.steps)


def _scale_lr(lr: float, rule: str, world_size: int) -> float:
    return lr * {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[rule]
