"""Compresses gradients for communication; weights and optimizer keep their precision.

torch's own bf16 hook refuses gloo, although gloo sums bf16: this one serves every backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcjobs.runtime.exits import UsageError

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POWERSGD_RANK = 2
Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]


def compress(model: DistributedDataParallel, kind: str, *, backend: str) -> None:
    """Register the hook that `--compress` names."""
    if kind in HALVES:
        model.register_comm_hook(None, half(HALVES[kind]))
    elif kind == "powersgd":
        if backend == "gloo":
            raise UsageError("--compress powersgd aborts now and then on gloo", hint="--compress bf16")
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def half(dtype: torch.dtype) -> Hook:
    """Divide before the sum, so that fp16 does not overflow where the mean would not."""

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        small = gradients.div(dist.get_world_size()).to(dtype)
        work = dist.all_reduce(small, async_op=True)
        assert work is not None

        def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            gradients.copy_(done.value()[0])
            return gradients

        arrived: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
        return arrived

    hook.__annotations__.clear()  # DDP compares them with the types, and here they are strings
    return hook
