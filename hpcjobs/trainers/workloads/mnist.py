"""Handwritten digits and a small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path

import torch
from torch import nn

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload, classification_loss, classification_score
from hpcjobs.trainers.workloads.batch import move_numbers
from hpcjobs.trainers.workloads.digits import Digits, idx_digits, shipped_digits

MEAN, SPREAD = 0.1307, 0.3081  # of MNIST's pixels
CHANNELS = (16, 32)
HIDDEN = 128


class DigitDataset:
    """Images [n, 1, 28, 28], normalised, and labels [n]; in memory."""

    def __init__(self, digits: Digits) -> None:
        pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
        self.images = (pixels / 255 - MEAN) / SPREAD
        self.labels = torch.tensor(digits.labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def on_device(self, device: torch.device) -> DigitDataset:
        """The same digits in the memory of a GPU, where batches are then made: all 70,000 of MNIST are 220 MB."""
        moved = copy(self)
        moved.images, moved.labels = self.images.to(device), self.labels.to(device)
        return moved

    def read_batch(self, indices: Sequence[int]) -> Batch:
        chosen = move_numbers(indices, self.images.device)
        return self.images[chosen], self.labels[chosen]


def digit_network() -> nn.Module:
    """Two convolutions and two linear layers. Each is normalised, so that it learns at rates from 0.001 to 0.1."""
    first, second = CHANNELS
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2), nn.GroupNorm(1, first), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2), nn.GroupNorm(1, second), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * 7 * 7, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10),
    )  # fmt: skip


def flops_per_image() -> float:
    """Three times the forward pass, which is two per multiply-add."""
    first, second = CHANNELS
    convolutions = 28 * 28 * first * 25 + 14 * 14 * second * first * 25
    return 3 * 2 * (convolutions + second * 49 * HIDDEN + HIDDEN * 10)


def mnist(config: Config) -> Workload:
    train, held_out = shipped_digits() if config.data is None else idx_digits(Path(config.data))
    return Workload(
        name="mnist",
        unit="images",
        units_per_sample=1,
        flops_per_sample=flops_per_image(),
        build_model=digit_network,
        loss=classification_loss,
        evaluate=classification_score,
        train=DigitDataset(train),
        held_out=DigitDataset(held_out),
        batch_size=16,
        lr=2e-3,
        epochs=3,
        convolutions=True,
    )
