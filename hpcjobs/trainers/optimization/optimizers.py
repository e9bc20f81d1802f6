"""Builds parameter groups and the optimizer, and keeps an exponential moving average of the weights.

The average is part of the optimizer's state, so checkpoints save it, reshard it and load it like moments. Evaluation
and export may use it instead of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import GroupedParameters, ParameterGroup, Workload

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
        return _build_own(workload.optimizer, settings, lr)
    if workload.optimizer == "sgd":
        momentum = MOMENTUM if config.momentum is None else config.momentum
        sharded = any(isinstance(parameter, DTensor) for _, parameters in groups for parameter in parameters)
        return torch.optim.SGD(
            settings, lr=lr, momentum=momentum, fused=not sharded
        )  # torch has no fused SGD of shards
    if workload.optimizer == "adafactor":
        return torch.optim.Adafactor(settings, lr=lr)
    if workload.optimizer == "adamw":
        betas = config.betas or BETAS
        return torch.optim.AdamW(settings, lr=lr, betas=(betas[0], betas[1]), eps=config.eps or EPS, fused=True)
    raise UsageError(
        f"the workload {workload.name} has the optimizer {workload.optimizer!r}: there are {', '.join(OPTIMIZERS)}",
        hint="another one is a function: optimizer=lambda groups, lr: torch.optim.NAdam(groups, lr=lr)",
    )


def _build_own(
    build: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer], settings: list[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    optimizer = build(settings, lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"`optimizer` of the workload returned a {type(optimizer).__name__}, not a torch Optimizer")
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the step; groups have a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
