"""Checks what functions of a user's workload return, and names the mistake."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.workloads.base import Metrics, Workload


def split_loss(result: Any, workload: Workload) -> tuple[torch.Tensor, Metrics]:
    """The loss, and the metrics beside it.

    Raises:
        UsageError: one of them is not a tensor of one number.
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    _refuse_other_than_scalar(loss, f"the loss of the workload {workload.name}")
    if not metrics:
        return loss, {}
    for name, value in metrics.items():
        _refuse_other_than_scalar(value, f"the metric {name} of the workload {workload.name}")
    return loss, metrics


def _refuse_other_than_scalar(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{what} is a {type(value).__name__}, expected a tensor of one number")
    if value.numel() != 1:
        raise UsageError(f"{what} has the shape {tuple(value.shape)}, expected one number", hint=".mean()")


def refuse_loss_without_gradient(loss: torch.Tensor, workload: Workload) -> None:
    """Raises UsageError for a loss from which no gradient leads to a weight."""
    if not loss.requires_grad:
        raise UsageError(
            f"the loss of the workload {workload.name} does not depend on the model's weights",
            hint="computed under no_grad, or from detached values?",
        )


def refuse_other_model(model: object, workload: Workload) -> None:
    """Raises UsageError for what is no model."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"build_model of the workload {workload.name} returned a {type(model).__name__}, expected a torch.nn.Module"
        )


def refuse_frozen_model(model: nn.Module, workload: Workload) -> None:
    """Raises UsageError for a model that has nothing to train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"the model of the workload {workload.name} has no weights to train")
