"""Parameter groups, and the optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.workloads.base import Workload
from hpcjobs.trainers.workloads.parameters import GroupedParameters

OPTIMIZERS = ("adamw", "sgd")
MOMENTUM = 0.9


def build_optimizer(groups: GroupedParameters, workload: Workload, *, lr: float) -> torch.optim.Optimizer:
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
        sharded = any(isinstance(parameter, DTensor) for _, parameters in groups for parameter in parameters)
        return torch.optim.SGD(
            settings, lr=lr, momentum=MOMENTUM, fused=not sharded
        )  # torch has no fused SGD of shards
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(settings, lr=lr, fused=True)
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
