"""The held-out part, each sample counted once whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hpcjobs.runtime.summary import Evaluation
from hpcjobs.trainers.core.group import Group
from hpcjobs.trainers.workloads.base import Dataset, Workload


def evaluate(
    model: nn.Module,
    workload: Workload,
    held_out: Dataset,
    *,
    group: Group,
    batch_size: int,
    boundary: Callable[[], None] = lambda: None,
) -> Evaluation:
    """`boundary` is called after each forward pass, and may end it all by an exception.

    Every rank makes the same number of forward passes, since a sharded model's are collective:
    a rank whose share has run out repeats a sample whose score is not counted."""
    mine = range(group.rank, len(held_out), group.world_size)
    rounds = math.ceil(math.ceil(len(held_out) / group.world_size) / batch_size)
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)
    model.eval()
    with torch.no_grad():
        for start in range(0, rounds * batch_size, batch_size):
            indices = mine[start : start + batch_size]
            batch = held_out[list(indices) or [0]]
            score = workload.evaluate(model, tuple(part.to(group.device) for part in batch)).tensor
            if indices:
                sums += score
            boundary()
    model.train()
    loss_sum, correct, count = group.sum(sums).tolist()
    loss = loss_sum / count
    perplexity = math.exp(min(loss, 700.0)) if workload.perplexity else None
    return Evaluation(loss, correct / count, int(count), perplexity)
