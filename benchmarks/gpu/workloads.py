"""Workloads that only the proof needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload
from hpcjobs.trainers.workloads.lm import lm

TOO_MUCH = 1 << 50
REHEARSED = (
    "CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 78.20 GiB "
    "is free. Of the allocated memory 12.00 MiB is allocated by PyTorch."
)


def too_large(config: Config) -> Workload:
    """A loss that allocates more than any GPU has; on a CPU it raises what torch would."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        device = batch[0].device
        if device.type == "cpu":
            raise torch.OutOfMemoryError(REHEARSED)
        return torch.empty(TOO_MUCH, dtype=torch.uint8, device=device).float().mean()

    return replace(lm(config), loss=loss)
