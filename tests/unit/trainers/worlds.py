"""Workloads of a user's own, as the tests name them by dotted path."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Score, Workload, classification_score


class Points:
    """Two clouds of points in the plane."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read_batch(self, indices: Sequence[int]) -> Batch:
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


def drawing(config: Config) -> Workload:
    """Weights and losses depend on what NumPy and Python draw."""

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.bias.add_(float(np.random.rand()))
        return model

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return _loss(model, batch) * (1 + random.random() + float(np.random.rand()))

    return replace(points(config), build_model=build, loss=loss)


class PartBlock(nn.Module):
    """A residual block with a frozen layer and a layer that no pass uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.frozen, self.unused = nn.Linear(width, width).requires_grad_(False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep: torch.Tensor = x + self.down(torch.relu(self.up(self.frozen(x))))
        return deep


class PartNet(nn.Module):
    """Frozen, trained and unused weights, inside and outside of blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(2, width).requires_grad_(False)
        self.blocks = nn.Sequential(*(PartBlock(width) for _ in range(3)))
        self.extra, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.first(x)))
        return logits


class NoisyPoints(Points):
    """Points that cannot be told apart entirely: their gradients stay."""

    def read_batch(self, indices: Sequence[int]) -> Batch:
        places, label = super().read_batch(indices)
        return places + torch.as_tensor(indices).unsqueeze(1).mul(0.7).sin(), label


def partly(config: Config) -> Workload:
    return replace(
        points(config), build_model=PartNet, blocks=(PartBlock,), lr=1e-3, train=NoisyPoints(256), held_out=Points(10)
    )


def noisy_pairs(config: Config) -> Workload:
    """Samples that differ, and a model of one layer."""
    return replace(points(config), train=NoisyPoints(256), lr=0.05)


def normed(config: Config) -> Workload:
    """A model with BatchNorm, of samples that differ from rank to rank."""

    def build() -> nn.Module:
        layers = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2))
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), *layers, nn.Linear(8, 2))

    return replace(partly(config), build_model=build, blocks=(nn.Sequential,), lr=0.01)


class TiedNet(nn.Module):
    """Tied weights, a buffer that checkpoints have and one that they have not, and sizes that no world divides."""

    fixed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartBlock(7) for _ in range(2))
        self.first, self.norm = nn.Linear(2, 7), nn.BatchNorm1d(7)
        self.mixed, self.again = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.again.weight = self.mixed.weight
        self.head = nn.Linear(7, 2)
        self.register_buffer("fixed", torch.rand(7), persistent=False)
        nn.init.orthogonal_(self.mixed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.fixed
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.again(torch.relu(self.mixed(x))))
        return logits


def note_device(model: nn.Module) -> nn.Module:
    """The devices of the models that this rank builds, into built.txt."""
    with open(f"built-{os.environ['RANK']}.txt", "a", encoding="utf-8") as file:
        file.write(f"{next(model.parameters()).device.type}\n")
    return model


def tied(config: Config) -> Workload:
    return replace(partly(config), build_model=lambda: note_device(TiedNet()), blocks=())


def tied_by_value(config: Config) -> Workload:
    """The same model, whose construction reads a value, which the meta device cannot give."""

    def build() -> nn.Module:
        float(torch.zeros(()))
        return note_device(TiedNet())

    return replace(tied(config), build_model=build)


def loud(config: Config) -> Workload:
    """Some gradients overflow in fp16 at the first loss scales, and others do not."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return 512 * nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    return replace(partly(config), loss=loss)


class BranchNet(nn.Module):
    """Rank 1 uses one layer more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PartNet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net = self.net
        x = net.blocks(net.first(x))
        branch = os.environ["RANK"] == "1" and torch.is_grad_enabled()
        logits: torch.Tensor = net.head(x + net.extra(x) if branch else x)
        return logits


def branching(config: Config) -> Workload:
    return replace(partly(config), build_model=BranchNet)


class Pids(Points):
    """Each sample names the process that read it."""

    def read_batch(self, indices: Sequence[int]) -> Batch:
        return *super().read_batch(indices), torch.full((len(indices),), os.getpid())


SEEN: dict[str, list[object]] = {}
"""What `watched` saw in this process: of training and of evaluation, the reader's pid and the precision."""


def watched(config: Config) -> Workload:
    SEEN.clear()

    def note(kind: str, batch: Batch) -> None:
        SEEN.setdefault(f"{kind} pid", []).append(int(batch[2][0]))
        SEEN.setdefault(f"{kind} autocast", []).append(torch.is_autocast_enabled("cpu"))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        note("train", batch)
        return _loss(model, batch)

    def evaluate(model: nn.Module, batch: Batch) -> Score:
        note("held out", batch)
        return classification_score(model, batch[:2])

    return replace(points(config), loss=loss, evaluate=evaluate, train=Pids(64), held_out=Pids(40))


def scored(config: Config) -> Workload:
    """The held-out loss of each epoch is known beforehand."""
    return _with_losses(config, 3.0, 1.0, 2.0, 0.5)


def scored_nan(config: Config) -> Workload:
    """The held-out loss of the first epoch is no number."""
    return _with_losses(config, math.nan, 1.0, 2.0, 0.5)


def _with_losses(config: Config, *losses: float) -> Workload:
    left = iter(losses)

    def evaluate(model: nn.Module, batch: Batch) -> Score:
        return Score(torch.tensor([next(left), 1.0, 1.0], dtype=torch.float64))

    return replace(points(config), evaluate=evaluate, held_out=Points(8))


class SlowPoints(Points):
    """Rank 1 waits for its data."""

    def read_batch(self, indices: Sequence[int]) -> Batch:
        if os.environ["RANK"] == "1":
            time.sleep(0.1)
        return super().read_batch(indices)


class Listed(Points):
    """Writes the numbers of the samples that are read into the file LISTED."""

    def read_batch(self, indices: Sequence[int]) -> Batch:
        with open(os.environ["LISTED"], "a", encoding="utf-8") as file:
            file.write("".join(f"{index}\n" for index in indices))
        return super().read_batch(indices)


def listed(config: Config) -> Workload:
    return replace(points(config), train=Listed(64))


def lopsided(config: Config) -> Workload:
    """Rank 1 is slower: 100 ms for its data, and 100 ms more for each pass."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(0.1)
        return _loss(model, batch)

    return replace(points(config), loss=loss, train=SlowPoints(512))
