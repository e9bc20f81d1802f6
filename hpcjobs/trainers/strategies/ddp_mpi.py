"""`ddp --comm mpi`: gradients in one flat buffer, summed by MPI after the backward pass, where ranks own their cores.

On CPU nodes the process group's all-reduce is a thread of gloo that takes a core from the computation. MPI sums in the
memory that the ranks of a node share and needs no thread. It waits by spinning, so on shared cores it would slow down
the ranks that it waits for. There, and where MPI is missing, DDP itself is used, and a line says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hpcjobs.runtime.exits import UsageError, WorldMismatch
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed.cpu_affinity import describe_shared_cores
from hpcjobs.trainers.distributed.mpi import Mpi
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.strategies.base import Strategy, Traffic
from hpcjobs.trainers.strategies.ddp import Ddp
from hpcjobs.trainers.strategies.ddp_scratch import make_buckets
from hpcjobs.trainers.workloads.base import Workload


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

    def named_parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return (Ddp if self.gradients is None else Strategy).named_parameters(self, model)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return super().model_state(model) if self.gradients is None else Strategy.model_state(self, model)

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        (Ddp if self.gradients is None else Strategy).load_model_state(self, model, state)

    def traffic(self, model: nn.Module) -> Traffic | None:
        return super().traffic(model) if self.gradients is None else self.gradients.traffic()


def refuse_unsuitable(model: nn.Module, group: RankGroup) -> None:
    """Raises WorldMismatch, on all ranks alike, where the process group is the better choice."""
    if group.world_size == 1:
        raise WorldMismatch("one rank has no other rank to sum with")
    if next(model.buffers(), None) is not None:
        raise WorldMismatch("the model has buffers, such as BatchNorm's, which DDP sends around")
    mine = (torch.get_num_threads(), os.sched_getaffinity(0))
    everyone = cast(list[tuple[int, set[int]]], group.gather(mine))
    if next(describe_shared_cores(group.hosts, everyone), None) is not None:
        raise WorldMismatch("ranks share cores")


class FlatGradients:
    """All gradients in one buffer per dtype, the last layer's first: the order in which backward completes them.

    A hook writes each gradient's share of the mean into the buffer while it is still in the cache: one pass over
    memory, where a buffer that backward adds to would be cleared, added to and divided.
    """

    def __init__(self, parameters: list[nn.Parameter], mpi: Mpi, world_size: int) -> None:
        self._mpi, self._world_size = mpi, world_size
        self._buckets = make_buckets(parameters, float("inf"))
        pairs = [pair for bucket in self._buckets for pair in zip(bucket.parameters, bucket.views, strict=True)]
        self._views = dict(pairs)
        self._missing = set(self._views)  # parameters without a gradient in this step so far
        self._local = False
        for parameter in self._views:
            parameter.register_post_accumulate_grad_hook(self._make_hook())  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def _make_hook(self) -> Callable[[nn.Parameter], None]:
        def copy_unless_local(parameter: nn.Parameter) -> None:
            if not self._local:
                self._copy(parameter)

        return copy_unless_local

    def _copy(self, parameter: nn.Parameter) -> None:
        """Write this rank's share of the mean into the buffer; zero where there is no gradient."""
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
