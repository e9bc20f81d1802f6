"""What is trained: one value says everything a strategy needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]


class Dataset(Protocol):
    """Samples by number; a list of numbers gives one collated batch, so a loader needs no collation."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Score:
    """Sums over a batch of the held-out part: `tensor` is [loss sum, correct, predictions]."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Workload:
    name: str
    unit: str  # what throughput counts: "images", "tokens"
    units_per_sample: float
    flops_per_sample: float  # of forward and backward together, counted by the formula in docs/trainers.md
    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]  # mean over the batch
    evaluate: Callable[[nn.Module, Batch], Score]
    train: Dataset
    held_out: Dataset | None
    # defaults, for what the command line leaves open
    batch_size: int
    lr: float
    epochs: int = 1
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    blocks: tuple[type[nn.Module], ...] = ()  # the modules that sharding takes one at a time
    perplexity: bool = False  # evaluation also gives exp(loss)
    synthetic: Callable[[int], Dataset] | None = None  # training data made up on the spot, of any length
    convolutions: bool = False  # of inputs of one shape: cuDNN may try its algorithms and keep the quickest


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy in fp32, mean over every prediction; logits may have more than two dimensions."""
    inputs, targets = batch
    logits = model(inputs).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def classification_score(model: nn.Module, batch: Batch) -> Score:
    inputs, targets = batch
    logits, labels = model(inputs).flatten(0, -2).float(), targets.flatten()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(-1) == labels).sum()
    count = torch.tensor(float(labels.numel()), device=loss.device)
    return Score(torch.stack([loss.double(), correct.double(), count.double()]))
