"""Resolves steps, batch sizes and learning rates of a run, once, from flags, workload and world size.

A schedule maps a step and the number of steps, both counted after the warm-up, to a factor of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Schedule, Workload

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


WARMUP_SHARE = 0.1  # of a run's steps, where its rate is above the workload's own (Goyal et al. 2017)
SYNTHETIC_STEPS = 32  # of an epoch of synthetic data, at least: full batches whatever the world size


@dataclass(frozen=True)
class EpochPosition:
    """A place in the data: the samples of an epoch that all ranks have taken, at a step of that epoch.

    `done` counts the steps of the run until there, at all world sizes.
    """

    epoch: int
    step: int
    samples: int
    done: int


@dataclass(frozen=True)
class TrainingPlan:
    """Steps are counted from the first one of the run, whatever the world sizes of its attempts were.

    So the number of finished steps only grows, and `--steps N` is N steps.
    """

    world_size: int
    batch_size: int  # per rank and forward pass
    accumulate: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    steps_limit: int | None
    epochs_limit: int | None  # whichever limit is nearer ends the run
    lr: float  # after scaling with the world size
    warmup_steps: int
    epoch_samples: int  # of the training data; of a stream without a length, all that the run takes
    fill: bool  # ranks repeat samples, so that each has as many
    schedule: Schedule
    has_length: bool = True  # of the training data; a stream without one is an epoch of as many samples as it takes
    resumed: EpochPosition | None = None

    def first_sample(self, epoch: int, step: int) -> int:
        """Samples of the epoch that all ranks have taken before its step `step`."""
        start = self.resumed
        if start is None or start.epoch != epoch:
            return min(step * self.global_batch_size, self.epoch_samples)
        return min(start.samples + (step - start.step) * self.global_batch_size, self.epoch_samples)

    def samples_of_epoch(self, epoch: int, step: int) -> int:
        """Samples of the epoch that all ranks have taken in `step` steps of the run."""
        return self.first_sample(epoch, step - self._shift - epoch * self.steps_per_epoch)

    def last_step_of(self, epoch: int) -> int:
        """Finished steps of the run when the epoch ends, or the run within it."""
        return min((epoch + 1) * self.steps_per_epoch + self._shift, self.total_steps)

    def resume_at(self, epoch: int, samples: int, *, done: int) -> TrainingPlan:
        """Return the plan of a run that continues after `done` steps and `samples` samples of an epoch.

        The position becomes the step of this plan's epoch that leaves as many steps as the remaining samples need.
        """
        epoch_samples = self.epoch_samples
        if not self.has_length:
            assert self.steps_limit is not None
            epoch_samples = samples + max(0, self.steps_limit - done) * self.global_batch_size
        elif samples >= epoch_samples:
            epoch, samples = epoch + 1, 0
        per_rank = math.ceil((epoch_samples - samples) / self.world_size)
        left = math.ceil(per_rank / self.samples_per_step)
        steps_per_epoch = self.steps_per_epoch if self.has_length else done + left
        position = EpochPosition(epoch, steps_per_epoch - left, samples, done)
        before = done - (epoch * steps_per_epoch + position.step)
        steps = _count_steps(self.epochs_limit, self.steps_limit, steps_per_epoch, before=before)
        return replace(
            self,
            epochs=max(math.ceil((steps - before) / steps_per_epoch), epoch),
            steps_per_epoch=steps_per_epoch,
            epoch_samples=epoch_samples,
            total_steps=max(steps, done),
            resumed=position,
        )

    @property
    def _shift(self) -> int:
        """Finished steps minus the steps that this world needs to the resumed position; may be negative."""
        at = self.resumed
        return 0 if at is None else at.done - (at.epoch * self.steps_per_epoch + at.step)

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of the step after `step` finished ones, and the finished steps of that epoch."""
        return divmod(step - self._shift, self.steps_per_epoch)

    def ends_epoch(self, step: int, *, every: int = 1) -> bool:
        """Whether `step` finished steps end an epoch, or each `every`th."""
        return (step - self._shift) % (every * self.steps_per_epoch) == 0

    def epochs_after(self, step: int) -> float:
        """Passes over the training data."""
        return (step - self._shift) / self.steps_per_epoch

    @property
    def samples_per_step(self) -> int:
        """The samples of one rank per step."""
        return self.batch_size * self.accumulate

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_step * self.world_size

    def samples_before(self, step: int) -> int:
        """Samples that all ranks take in the first `step` steps; the last batches of an epoch may be smaller."""
        epochs, steps = self.locate(step)
        return epochs * self._in_epoch(self.steps_per_epoch) + self._in_epoch(steps)

    def _in_epoch(self, steps: int) -> int:
        """Samples of all ranks in the first steps of an epoch; without `fill`, some ranks have one sample more."""
        share, extra = divmod(self.epoch_samples, self.world_size)
        most = steps * self.samples_per_step
        if self.fill and extra:
            extra = self.world_size
        return extra * min(most, share + 1) + (self.world_size - extra) * min(most, share)

    def lr_at(self, step: int) -> float:
        """The rate of step 0, 1, …: a function of the number alone, so a resumed run needs no more.

        If the limit of epochs ends the run, the step is counted by the position in the data: the rate then continues
        also at a world size that needs more or fewer steps for an epoch.
        """
        total = self.total_steps
        if self.epochs_limit is not None and total == self.epochs_limit * self.steps_per_epoch + self._shift:
            step, total = step - self._shift, total - self._shift
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * self.schedule(step - self.warmup_steps, total - self.warmup_steps)


def grow_synthetic(config: Config, workload: Workload, world_size: int) -> Workload:
    """Return the workload with synthetic data for at least SYNTHETIC_STEPS full steps; real data and data of a given
    length do not change."""
    if workload.synthetic is None or config.train_samples is not None:
        return workload
    count = SYNTHETIC_STEPS * _batch_size(config, workload) * config.accumulate * world_size
    return workload if count <= len(workload.train) else replace(workload, train=workload.synthetic(count))


def choose_schedule(config: Config, workload: Workload) -> Schedule:
    """Return the schedule of --lr-schedule, the workload's, or a constant rate, in this order."""
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
    limited = config.steps is not None and config.epochs is None
    epochs_limit = None if limited else workload.epochs if config.epochs is None else config.epochs
    steps = _count_steps(epochs_limit, config.steps, steps_per_epoch)
    scales = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}
    lr = (workload.lr if config.lr is None else config.lr) * scales[config.lr_scaling]
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = math.ceil(WARMUP_SHARE * steps) if lr > workload.lr else 0
    return TrainingPlan(
        world_size=world_size,
        batch_size=batch_size,
        accumulate=config.accumulate,
        epochs=math.ceil(steps / steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        total_steps=steps,
        steps_limit=config.steps,
        epochs_limit=epochs_limit,
        lr=lr,
        warmup_steps=warmup_steps,
        epoch_samples=length,
        fill=fill,
        schedule=choose_schedule(config, workload),
        has_length=workload.train_length is not None,
    )


def _batch_size(config: Config, workload: Workload) -> int:
    return workload.batch_size if config.batch_size is None else config.batch_size


def _count_steps(epochs: int | None, steps: int | None, steps_per_epoch: int, *, before: int = 0) -> int:
    """Return the steps of the run by the nearer limit; `before` is the plan's `_shift`."""
    limits = [] if epochs is None else [epochs * steps_per_epoch + before]
    return min(limits if steps is None else [*limits, steps])
