"""One optimizer step, the same for every strategy and workload, and the optimizer with its parameter groups.

An exponential moving average of the weights is part of the optimizer's state, so checkpoints save it, reshard it and
load it like moments. Evaluation and export may use it instead of the weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.plan import TrainingPlan
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
    Workload,
    count_samples,
    order_names,
    slice_batch,
    split_loss,
)

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

    Raises:
        UsageError: a flag belongs to another optimizer, or has an invalid value.
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
            model = workload.build_model()
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
        if self.clip_norm is not None:
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
