"""A workload of matrix products alone: its rate is the upper limit of every training step on this device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload, classification_score

SIDE_CPU, SIDE_GPU = 2048, 8192  # large enough that a product takes milliseconds
PRODUCTS = 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Products(nn.Module):
    """One product of two square matrices per sample, into a third that is kept. The model has
    one weight without an effect, so that strategies have a gradient to reduce."""

    left: torch.Tensor
    right: torch.Tensor
    product: torch.Tensor

    def __init__(self, side: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for name in ("left", "right", "product"):
            self.register_buffer(name, torch.randn(side, side).to(dtype), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(len(numbers)):
                torch.mm(self.left, self.right, out=self.product)
        return self.weight.square().sum()


class Numbers:
    """Samples that are only counted."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def on_device(self, device: torch.device) -> Numbers:
        """Return itself: the numbers are not read, so they need no copy on a GPU and no worker process."""
        return self

    def read_batch(self, indices: Sequence[int]) -> Batch:
        return (torch.as_tensor(indices),)


def matmul(config: Config) -> Workload:
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    side = (SIDE_GPU if on_gpu else SIDE_CPU) if config.matrix_size is None else config.matrix_size
    flops = 2.0 * side**3
    return Workload(
        name="matmul",
        unit="GFLOP",
        units_per_sample=flops / 1e9,
        flops_per_sample=flops,
        build_model=lambda: Products(side, DTYPES[config.precision]),
        loss=lambda model, batch: model(batch[0]),
        evaluate=classification_score,
        train=Numbers(PRODUCTS if config.train_samples is None else config.train_samples),
        held_out=None,
        batch_size=4,
        lr=0.0,
        synthetic=Numbers,
    )
