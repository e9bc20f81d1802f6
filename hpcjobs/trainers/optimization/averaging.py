"""An exponential moving average of the weights, which evaluation and export may use instead of the weights.

It is part of the optimizer's state, so checkpoints save it, reshard it and load it as they do with moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

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
    """Inside, the parameters have the averaged values, and the averages those of the parameters."""
    pairs = [(p, optimizer.state[p][KEY]) for p in _list_stepped(optimizer) if KEY in optimizer.state[p]]
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


def _list_stepped(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters that have been stepped: before its first step an optimizer takes any state for its own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if optimizer.state.get(parameter)]


@torch.no_grad()
def _swap(pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, other in pairs:
        before = parameter.detach().clone()
        parameter.copy_(other)
        other.copy_(before)
