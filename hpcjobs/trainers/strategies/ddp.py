"""Strategies on torch's DistributedDataParallel, with compressed gradients, and with gradients summed by MPI.

Compression is of gradients only; weights and optimizer keep their precision. torch's own bf16 hook refuses gloo,
although gloo sums bf16: this one serves every backend.

`ddp --comm mpi`: MPI sums the gradients in one flat buffer after the backward pass, if ranks own their cores.
On CPU nodes the process group's all-reduce is a thread of gloo that takes a core from the computation. MPI sums in the
memory that the ranks of a node share and needs no thread. It waits by spinning, so on shared cores it would slow down
the ranks that it waits for. On shared cores, and without MPI, DDP itself is used, and the log has the reason.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcjobs.runtime.exits import UsageError, WorldMismatch
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed import Mpi, RankGroup, describe_shared_cores
from hpcjobs.trainers.strategies import Strategy, Traffic
from hpcjobs.trainers.strategies.ddp_scratch import make_buckets
from hpcjobs.trainers.workloads.base import Workload

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


class Ddp(Strategy):
    """PyTorch's DistributedDataParallel: the model is complete on every rank."""

    name = "ddp"
    quiet_passes = True

    def __init__(self, flags: DdpFlags) -> None:
        self.flags = flags
        self.recorded = not flags.static_graph  # DDP records a static graph in its first step

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[group.device.index] if group.device.type == "cuda" else None,
            bucket_cap_mb=self.flags.bucket_cap_mb,
            gradient_as_bucket_view=self.flags.gradient_as_bucket_view,
            static_graph=self.flags.static_graph,
            find_unused_parameters=self.flags.find_unused_parameters,
            **self._buffers(),  # type: ignore[arg-type]
        )
        compress(wrapped, self.flags.compress, backend=group.backend)
        return wrapped

    def _buffers(self) -> dict[str, bool]:
        """Passed only when it differs from torch's default, by the name that this torch knows."""
        if self.flags.broadcast_buffers:
            return {}
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP records a static graph in passes that synchronise, so all passes of the first step do. That moves more
        bytes and gives the same gradients: a second mean over ranks does not change them."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync() if self.recorded else nullcontext()

    def after_backward(self, model: nn.Module) -> None:
        self.recorded = True

    def named_parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return super().named_parameters(bare(model))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return super().model_state(bare(model))

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        super().load_model_state(bare(model), state)

    def traffic(self, model: nn.Module) -> Traffic | None:
        """From DDP's own record of its buckets, which it settles during the first two steps."""
        assert isinstance(model, DistributedDataParallel)
        record = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = record.get("rebuilt_bucket_sizes") or record.get("bucket_sizes")
        if not sizes or self.flags.compress == "powersgd":
            return None
        buckets = [int(size) for size in str(sizes).split(",")]
        share = 2 if self.flags.compress in HALVES else 1
        return Traffic(bytes=sum(buckets) // share, calls=len(buckets))


def bare(model: nn.Module) -> nn.Module:
    """The model itself, so that a checkpoint of one strategy loads under another; MPI needs no DDP around it."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def make_ddp(flags: DdpFlags) -> Strategy:
    """The strategy that ``--comm`` names."""
    return DdpOverMpi(flags) if flags.comm == "mpi" else Ddp(flags)


class DdpOverMpi(Ddp):
    """Replaces DDP's reducer by `FlatGradients`; without MPI it is DDP itself."""

    def __init__(self, flags: DdpFlags) -> None:
        super().__init__(flags)
        self.gradients: FlatGradients | None = None

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        if self.flags.compress != "none":
            raise UsageError(f"--compress {self.flags.compress} needs --comm group: MPI sums gradients uncompressed")
        try:
            refuse_unsuitable(model, group)
            mpi = Mpi.of(group)
        except WorldMismatch as error:
            group.log(f"--comm mpi: {error.message}; gradients travel by {group.backend}")
            return super().wrap(model, group=group, workload=workload, dtype=dtype)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        self.gradients = FlatGradients([p for p in model.parameters() if p.requires_grad], mpi, group.world_size)
        self.backend = "mpi"
        group.log(f"--comm mpi: gradients are summed by {mpi.library}")
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return super().no_sync(model) if self.gradients is None else self.gradients.no_sync()

    def after_backward(self, model: nn.Module) -> None:
        if self.gradients is None:
            super().after_backward(model)
        else:
            self.gradients.sum()

    def traffic(self, model: nn.Module) -> Traffic | None:
        return super().traffic(model) if self.gradients is None else self.gradients.traffic()


def refuse_unsuitable(model: nn.Module, group: RankGroup) -> None:
    """Raises WorldMismatch, on all ranks alike, where the process group is the better choice."""
    if group.world_size == 1:
        raise WorldMismatch("one rank has no other rank to sum with")
    if next(model.buffers(), None) is not None:
        raise WorldMismatch("the model has buffers, such as BatchNorm's, which DDP sends around")
    mine = (torch.get_num_threads(), os.sched_getaffinity(0))
    gathered = cast(list[tuple[int, set[int]]], group.gather(mine))
    if next(describe_shared_cores(group.hosts, gathered), None) is not None:
        raise WorldMismatch("ranks share cores")


class FlatGradients:
    """All gradients in one buffer per dtype, in the order of backward: the last layer comes first.

    A hook writes each gradient's share of the mean into the buffer while it is still in the cache: one pass over
    memory, where a buffer that backward adds to would be cleared, added to and divided.
    """

    def __init__(self, parameters: list[nn.Parameter], mpi: Mpi, world_size: int) -> None:
        self._mpi, self._world_size = mpi, world_size
        self._buckets = make_buckets(parameters, float("inf"))
        pairs = [pair for bucket in self._buckets for pair in zip(bucket.parameters, bucket.views, strict=True)]
        self._views = dict(pairs)
        self._missing = set(self._views)  # parameters still without a gradient in this step
        self._local = False
        for parameter in self._views:
            parameter.register_post_accumulate_grad_hook(self._copy_unless_local)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def _copy_unless_local(self, parameter: nn.Parameter) -> None:
        if not self._local:
            self._copy(parameter)

    def _copy(self, parameter: nn.Parameter) -> None:
        """Write this rank's share of the mean into the buffer; zero without a gradient."""
        view = self._views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.div(parameter.grad, self._world_size, out=view)
        parameter.grad = view
        self._missing.discard(parameter)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum over ranks after the pass; a parameter without a gradient counts as zero."""
        for parameter in list(self._missing):
            self._copy(parameter)
        for bucket in self._buckets:
            self._mpi.sum(bucket.buffer)
        self._missing = set(self._views)

    def traffic(self) -> Traffic:
        sizes = [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self._buckets]
        return Traffic(bytes=sum(sizes), calls=len(sizes))
