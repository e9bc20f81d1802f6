"""BatchNorm over the batches of all ranks, on every device and backend: torch's own SyncBatchNorm is for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.strategies.base import Strategy


def synchronize_batch_norms(model: nn.Module, strategy: Strategy) -> None:
    """Replace each BatchNorm of the model; parameters and buffers stay.

    Raises:
        UsageError: a rank may have no batch where others have one, and would keep them waiting.
    """
    if not strategy.fills:
        raise UsageError("--sync-batchnorm and --join: a rank without samples would keep the others waiting")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SynchronizedBatchNorm):
                setattr(parent, name, SynchronizedBatchNorm.of(child))


class SynchronizedBatchNorm(_BatchNorm):
    """While it trains, mean and variance are those of the samples of all ranks."""

    @classmethod
    def of(cls, other: _BatchNorm) -> SynchronizedBatchNorm:
        """With the tensors of another one."""
        made = cls(
            other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats, device="meta"
        )
        made._parameters, made._buffers = other._parameters, other._buffers
        return made.train(other.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected samples and channels, got the shape {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.float()
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = AllReduce.apply(torch.cat([values.sum(others), count]))  # type: ignore[no-untyped-call]
        total = sums[-1].detach()
        mean = (sums[:-1] / total).view(1, -1, *[1] * (values.dim() - 2))
        centred = values - mean
        variance = AllReduce.apply(centred.square().sum(others)) / total  # type: ignore[no-untyped-call]
        self._update_running(mean.detach().flatten(), variance.detach() * total / (total - 1).clamp(min=1))
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight.float()
        result = centred * scale.view_as(mean)
        if self.affine:
            result = result + self.bias.float().view_as(mean)
        normalized: torch.Tensor = result.to(input.dtype)
        return normalized

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class AllReduce(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed
