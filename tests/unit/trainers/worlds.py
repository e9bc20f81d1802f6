"""Workloads of a user's own, as the tests name them by dotted path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload, classification_score


class Points:
    """Two clouds of points in the plane."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        label = torch.as_tensor(indices) % 2
        return torch.stack([label * 2.0 - 1.0, label * 0.5], dim=-1), label


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def points(config: Config) -> Workload:
    return Workload(
        name="points",
        unit="points",
        units_per_sample=1,
        flops_per_sample=12.0,
        build_model=lambda: nn.Linear(2, 2),
        loss=_loss,
        evaluate=classification_score,
        train=Points(64),
        held_out=None,
        batch_size=8,
        lr=0.1,
    )


def noisy_points(config: Config) -> Workload:
    """Dropout: every step depends on the random generator of its rank."""
    return replace(
        points(config),
        build_model=lambda: nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, 2)),
        held_out=Points(10),
        lr=0.01,
    )


def full_on_rank_1(config: Config) -> Workload:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            raise MemoryError
        return _loss(model, batch)

    return replace(points(config), loss=loss)


def more_on_rank_1(config: Config) -> Workload:
    return replace(points(config), train=Points(64 + int(os.environ["RANK"])))
