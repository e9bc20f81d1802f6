"""Data parallelism from primitives.

Every rank holds the whole model and sees different samples. If each rank's loss is the mean over its
samples, the gradient of the mean over all samples is the mean of the ranks' gradients: sum them over the
world, divide by its size, and all ranks take the same step from the same weights for ever.

Bytes: a ring all-reduce of S bytes over n ranks has two passes, reduce-scatter and all-gather, in each of
which a rank sends n-1 parts of S/n. So each rank sends 2·(n-1)/n·S bytes per step, nearly 2·S however
many ranks there are, and the time is at least that over the bandwidth of one link.

Calls: each all-reduce also costs a latency, so gradients travel in buckets of some MiB. One bucket would
have to wait for the last gradient; several can travel while earlier layers still compute theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hpcjobs.trainers.ddp_scratch import DdpScratchFlags
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.strategies import Strategy, Traffic
from hpcjobs.trainers.workloads.base import Workload


class Bucket:
    """Parameters with gradients in one contiguous buffer, which is sent as one message."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        sizes = [p.numel() for p in parameters]
        parts = zip(parameters, self.buffer.split(sizes), strict=True)  # type: ignore[no-untyped-call]
        # strides too are the parameter's: a fused optimizer goes through both in the order of memory
        self.views = [torch.as_strided(part, p.shape, p.stride(), part.storage_offset()) for p, part in parts]
        self.waiting = len(parameters)
        self.travelling: dist.Work | None = None

    def own_gradients(self) -> None:
        """Point every gradient into the buffer: backward then adds to it in place, without a copy."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def send(self, world_size: int) -> None:
        """Start the sum, and do not wait for it."""
        self.buffer.div_(world_size)  # before the sum, where fp16 might overflow
        self.travelling = dist.all_reduce(self.buffer, async_op=True)

    def land(self) -> None:
        """Wait until the sum is here, and be ready for the next backward pass."""
        if self.travelling is not None:
            self.travelling.wait()
        self.travelling, self.waiting = None, len(self.parameters)


def make_buckets(parameters: list[nn.Parameter], cap_bytes: float) -> list[Bucket]:
    """Last parameter first: backward completes gradients in about this order. One dtype per bucket."""
    groups: list[list[nn.Parameter]] = []
    filled = 0.0
    for parameter in reversed(parameters):
        if not groups or filled >= cap_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            filled = 0.0
        groups[-1].append(parameter)
        filled += parameter.numel() * parameter.element_size()
    return [Bucket(group) for group in groups]


class DdpScratch(Strategy):
    """Data parallelism by hand: an all-reduce per bucket of gradients, during the backward pass."""

    name = "ddp_scratch"
    quiet_passes = True

    def __init__(self, flags: DdpScratchFlags) -> None:
        self.cap_bytes = flags.bucket_cap_mb * 2**20
        self.buckets: list[Bucket] = []
        self.sent = 0  # buckets of this pass, from the first on
        self.syncing = True
        self.world_size = 1

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Equal weights everywhere to begin with, then a hook on every gradient."""
        self.world_size = group.world_size
        if self.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        self.buckets = make_buckets([p for p in model.parameters() if p.requires_grad], self.cap_bytes)
        for bucket in self.buckets:
            bucket.own_gradients()
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
        return model

    def _hook(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def send_if_complete(_: torch.Tensor) -> None:
            if self.syncing and self.world_size > 1:
                bucket.waiting -= 1
                while self.sent < len(self.buckets) and self.buckets[self.sent].waiting == 0:
                    self._send_next()

        return send_if_complete

    def _send_next(self) -> None:
        """Send in the order of the buckets, not of their completion: all ranks must issue the same collectives."""
        self.buckets[self.sent].send(self.world_size)
        self.sent += 1

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients add up in the buckets, and stay."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def after_backward(self, model: nn.Module) -> None:
        """The optimizer may read gradients only once they have all arrived. A parameter that this rank did not use
        has a gradient of zero, and others may have used it: its bucket is sent too."""
        while self.world_size > 1 and self.sent < len(self.buckets):
            self._send_next()
        self.sent = 0
        for bucket in self.buckets:
            bucket.land()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Fill the buckets with zeros: gradients set to None would no longer be views of the buckets."""
        for bucket in self.buckets:
            bucket.buffer.zero_()

    def traffic(self, model: nn.Module) -> Traffic:
        sizes = [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self.buckets]
        return Traffic(bytes=sum(sizes), calls=len(sizes))
