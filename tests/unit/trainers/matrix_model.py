"""The model and data of the matrix, and the workload around them; the plain loop uses the model and data alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

COUNT, LR = 90, 0.02


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep: torch.Tensor = x + torch.tanh(self.inner(self.norm(x)))
        return deep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(3, 6),
            nn.Sequential(*(Layer() for _ in range(3))),
            nn.Linear(6, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.layers(self.first(x)))
        return y


class Surface:
    """Points of a curved surface."""

    def __len__(self) -> int:
        return COUNT

    def read_batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points, targets and numbers of the samples."""
        n = torch.as_tensor(indices, dtype=torch.float32)
        x = torch.stack([torch.sin(n), torch.cos(0.7 * n), torch.sin(1.3 * n + 1)], dim=1)
        return x, (x[:, :1] * x[:, 1:2] - 0.5 * x[:, 2:]), n


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def trace_samples(batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Two means by which batches of different samples differ."""
    return {"numbers": batch[2].mean(), "squares": (batch[2] ** 2).mean()}


def workload(config: object) -> object:
    """All ranks are killed in the step KILL_AT of this start, once the file KILL_AFTER is there."""
    from hpcjobs.trainers.workloads.base import Workload

    calls = 0

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal calls
        calls += 1
        if calls == int(os.environ.get("KILL_AT", "0")):
            while not Path(os.environ["KILL_AFTER"]).exists():  # the others are still writing it
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_error(model, batch), trace_samples(batch)

    return Workload(
        name="matrix", unit="points", units_per_sample=1, flops_per_sample=1.0, build_model=Net, loss=loss,
        evaluate=None, train=Surface(), held_out=None, batch_size=4, lr=LR,
    )  # fmt: skip
