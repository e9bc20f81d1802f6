"""Resolves steps, batch sizes and rates of a run, once, from flags, workload and world size; makes one optimizer step.

A schedule maps a step and the number of steps, both counted after the warm-up, to a factor of the rate.

The step is the same for every strategy and workload. An exponential moving average of the weights is part of the
optimizer's state, so checkpoints save it, reshard it and load it like moments. Evaluation and export may use it instead
of the weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.strategies import (
    Skeleton,
    Strategy,
    build_skeleton,
    change_blocks,
    is_meta,
    materialize,
    synchronize_batch_norms,
)
from hpcjobs.trainers.weights import Adapters, add_adapters, list_saved, load_weights
from hpcjobs.trainers.workloads.base import (
    Batch,
    GroupedParameters,
    ParameterGroup,
    Schedule,
    Workload,
    count_samples,
    order_names,
    slice_batch,
    split_loss,
)

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


KEY = "weights_average"


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """After a step: average ← decay · average + (1 - decay) · weights. The first one is the weights themselves."""
    averages, weights = [], []
    for parameter in _list_stepped(optimizer):
        state = optimizer.state[parameter]
        if KEY in state:
            averages.append(state[KEY])
            weights.append(parameter.detach())
        else:
            state[KEY] = parameter.detach().clone()
    if averages:
        torch._foreach_lerp_(averages, weights, 1 - decay)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the values of parameters and averages are swapped."""
    pairs = [(p, optimizer.state[p][KEY]) for p in _list_stepped(optimizer) if KEY in optimizer.state[p]]
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


def _list_stepped(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that were stepped; the optimizer initialises a state only while it is empty."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if optimizer.state.get(parameter)]


@torch.no_grad()
def _swap(pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, other in pairs:
        before = parameter.detach().clone()
        parameter.copy_(other)
        other.copy_(before)


OPTIMIZERS = ("adafactor", "adamw", "sgd")
MOMENTUM, BETAS, EPS = 0.9, (0.9, 0.999), 1e-8


def apply_optimizer_flags(config: Config, workload: Workload) -> Workload:
    """Return the workload with the optimizer, weight decay and groups of the flags.

    Raises UsageError: a flag belongs to another optimizer, or has an invalid value.
    """
    optimizer = workload.optimizer if config.optimizer is None else config.optimizer
    decay = workload.weight_decay if config.weight_decay is None else config.weight_decay
    rule = workload.parameter_group
    if not config.decay_norms:
        if rule is not None:
            raise UsageError("--no-decay-norms: the workload puts its parameters into groups of its own")
        rule = spare_norms
    name = optimizer if isinstance(optimizer, str) else "the workload's own optimizer"
    given: dict[str, dict[str, object]] = {
        "adamw": {"--betas": config.betas, "--eps": config.eps},
        "sgd": {"--momentum": config.momentum},
    }
    for owner, flags in given.items():
        wrong = [flag for flag, value in flags.items() if value not in (None, ()) and name != owner]
        if wrong:
            raise UsageError(f"{wrong[0]} is of --optimizer {owner}, and this run has {name}")
    if config.betas and (len(config.betas) != 2 or max(config.betas) >= 1):
        raise UsageError(f"--betas {' '.join(map(str, config.betas))}: two numbers from 0 to less than 1")
    if config.ema is not None and optimizer == "sgd" and config.momentum == 0:
        raise UsageError(
            "--ema and --momentum 0: the average is kept in the optimizer's state, and sgd without momentum has none",
            hint="a small --momentum, or leave --ema out",
        )
    if config.ema is not None and config.ema >= 1:
        raise UsageError(f"--ema {config.ema:g}: a decay is less than 1", hint="0.999 averages about 1000 steps")
    return replace(workload, optimizer=optimizer, weight_decay=decay, parameter_group=rule)


def spare_norms(name: str, parameter: nn.Parameter) -> ParameterGroup:
    """No weight decay of norms and biases, which have one dimension."""
    return ParameterGroup(weight_decay=0.0 if parameter.ndim < 2 else None)


def build_optimizer(
    groups: GroupedParameters, workload: Workload, config: Config, *, lr: float
) -> torch.optim.Optimizer:
    """The workload's optimizer, by torch's fused kernels where it is one of ours."""
    settings: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": workload.weight_decay if group.weight_decay is None else group.weight_decay,
            "lr_scale": group.lr_scale,
        }
        for group, parameters in groups
    ]
    if not isinstance(workload.optimizer, str):
        optimizer = workload.optimizer(settings, lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"`optimizer` of the workload returned a {type(optimizer).__name__}, not a torch Optimizer"
            )
        return optimizer
    if workload.optimizer == "sgd":
        momentum = MOMENTUM if config.momentum is None else config.momentum
        sharded = any(isinstance(parameter, DTensor) for _, parameters in groups for parameter in parameters)
        return torch.optim.SGD(settings, lr=lr, momentum=momentum, fused=not sharded)  # none of shards
    if workload.optimizer == "adafactor":
        return torch.optim.Adafactor(settings, lr=lr)
    if workload.optimizer == "adamw":
        betas = config.betas or BETAS
        return torch.optim.AdamW(settings, lr=lr, betas=(betas[0], betas[1]), eps=config.eps or EPS, fused=True)
    raise UsageError(
        f"the workload {workload.name} has the optimizer {workload.optimizer!r}: there are {', '.join(OPTIMIZERS)}",
        hint="another one is a function: optimizer=lambda groups, lr: torch.optim.NAdam(groups, lr=lr)",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the step; groups have a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def seed_all(seed: int) -> None:
    """Seed torch's generators on all devices, NumPy's and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Model, optimizer and scaler, and how one batch moves them."""

    def __init__(
        self, config: Config, workload: Workload, strategy: Strategy, *, group: RankGroup, plan: TrainingPlan
    ) -> None:
        workload = apply_optimizer_flags(config, workload)
        self.workload, self.strategy, self.plan = workload, strategy, plan
        self.device, self.ema = group.device, config.ema
        self.clip_norm = math.inf if config.clip_norm is None and config.gradient_norm else config.clip_norm
        self.dtype = DTYPES.get(config.precision)

        self.adapters: Adapters | None = None

        def build() -> nn.Module:
            seed_all(config.seed)  # the same weights on all ranks; later each rank has another seed
            model: object = workload.build_model()
            if not isinstance(model, nn.Module):
                what = f"a {type(model).__name__}, expected a torch.nn.Module"
                raise UsageError(f"build_model of the workload {workload.name} returned {what}")
            if config.init_from is not None and not is_meta(model):
                load_weights(model, Path(config.init_from))
            if config.lora is not None:
                self.adapters = add_adapters(model, workload, config, group)
            return model

        skeleton = build_skeleton(build, group) if strategy.builds_skeleton else None
        if isinstance(skeleton, str):
            group.log(f"each rank builds the complete model, which the meta device cannot have: {skeleton}")
        bare = skeleton.model if isinstance(skeleton, Skeleton) else build().to(group.device)
        if not any(parameter.requires_grad for parameter in bare.parameters()):
            raise UsageError(f"the model of the workload {workload.name} has no weights to train")
        if config.sync_batchnorm:
            synchronize_batch_norms(bare, strategy)
        if config.activation_checkpointing or config.compile_blocks:
            workload = change_blocks(bare, workload, config, group)
        if workload.optimizer == "adafactor" and strategy.holds_shards:
            raise UsageError(
                f"--optimizer adafactor needs complete weights, of which a rank of {strategy.name} has parts"
            )
        self.saved_names: frozenset[str] | None = None if self.adapters is None else list_saved(bare)
        self.parameter_names = order_names(bare, workload)
        self.parameters = sum(parameter.numel() for parameter in bare.parameters())
        trained = sum(parameter.numel() for parameter in bare.parameters() if parameter.requires_grad)
        self.flops_share = (2 + trained / self.parameters) / 3
        """Share of the FLOPs of a step that trains all weights; a frozen weight saves a third, its gradient."""
        self.model = strategy.wrap(bare, group=group, workload=workload, dtype=self.dtype)
        if isinstance(skeleton, Skeleton):
            materialize(self.model, skeleton.weights, group)
            del skeleton  # with rank 0's copy of all weights
        if not strategy.autocasts:
            self.dtype = None
        self.forward: nn.Module = cast(nn.Module, torch.compile(self.model)) if config.compile else self.model
        seed_all(config.seed + 1 + group.rank)
        plain = build_optimizer(strategy.parameter_groups(self.model, workload), workload, config, lr=plan.lr)
        self.optimizer_name = workload.optimizer if isinstance(workload.optimizer, str) else type(plain).__name__
        self.optimizer = strategy.optimizer(plain, self.model)
        self._metric_sums: dict[str, torch.Tensor] = {}
        self._metric_samples = 0
        self._gradient_norms: list[torch.Tensor] = []
        self._evaluates_average = False
        self.scaler = strategy.scaler(group.device.type, enabled=config.precision == "fp16")

    def step(self, batch: Batch, number: int) -> torch.Tensor:
        """Train on this rank's part of global batch `number`; its mean loss, still on the device."""
        set_learning_rate(self.optimizer, self.plan.lr_at(number))
        loss = self.backward(batch)
        self.strategy.after_backward(self.model)
        if self.clip_norm is not None or self.strategy.holds_shards:
            self.scaler.unscale_(self.optimizer)  # where ranks hold shards, this also agrees on overflow
        if self.clip_norm is not None:  # after the loss scale is taken back: the limit is of true gradients
            self.clip(self.clip_norm)
        with self.strategy.stepping():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.strategy.zero_grad(self.optimizer)
        self.update_average()
        return loss

    def clip(self, max_norm: float) -> None:
        """Scale the gradients down to a norm of at most `max_norm`; the norm before is a metric."""
        self._gradient_norms.append(self.strategy.clip(self.strategy.parameters(self.model), max_norm))

    def update_average(self) -> None:
        """After the optimizer's step: the average of the weights follows, where --ema is given."""
        if self.ema is not None:
            update_average(self.optimizer, self.ema)

    @contextmanager
    def weights_to_evaluate(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, where --ema is given."""
        self._evaluates_average = self.ema is not None
        try:
            with self._swapped_weights() if self._evaluates_average else nullcontext():
                yield
        finally:
            self._evaluates_average = False

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that are trained: a checkpoint may be due within an evaluation."""
        with self._swapped_weights() if self._evaluates_average else nullcontext():
            yield

    @contextmanager
    def _swapped_weights(self) -> Iterator[None]:
        """Inside, weights and their averages are swapped; gathered weights are dropped before and after."""
        with averaged_weights(self.optimizer):
            self.strategy.drop_gathered(self.model)
            try:
                yield
            finally:
                self.strategy.drop_gathered(self.model)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of the batch's mean loss; only the last of several passes synchronises."""
        total, size = count_samples(batch), self.plan.batch_size
        if total <= size:
            return self._pass(batch)
        mean = torch.zeros((), device=self.device)
        for start in range(0, total, size):
            part = slice_batch(batch, start, start + size)
            quiet = self.strategy.no_sync(self.model) if start + size < total else nullcontext()
            with quiet:
                mean += self._pass(part, share=count_samples(part) / total)
        return mean

    def _pass(self, batch: Batch, *, share: float | None = None) -> torch.Tensor:
        """Run one forward and backward pass, and return its loss, multiplied by `share` if given."""
        with self.autocast():
            loss = self.compute_loss(batch)
            if not loss.requires_grad:
                raise UsageError(
                    f"the loss of the workload {self.workload.name} does not depend on the model's weights",
                    hint="computed under no_grad, or from detached values?",
                )
            if share is not None:
                loss = loss * share
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """The workload's loss; its metrics, if it has some, are added up until `take_metrics`."""
        loss, metrics = split_loss(self.workload.loss(self.forward, batch), self.workload)
        if not metrics:
            return loss
        samples = count_samples(batch)
        for name, value in metrics.items():
            self._metric_sums[name] = self._metric_sums.get(name, 0) + samples * value.detach()
        self._metric_samples += samples
        return loss

    def take_metrics(self) -> dict[str, torch.Tensor]:
        """Means of the workload's metrics and of the gradient's norm since the last call, still on the device."""
        means = {name: total / self._metric_samples for name, total in self._metric_sums.items()}
        if self._gradient_norms:
            means["gradient_norm"] = torch.stack(self._gradient_norms).mean()
        self._metric_sums, self._metric_samples, self._gradient_norms = {}, 0, []
        return means

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass: the lower precision, where the strategy leaves it to the loop."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)
