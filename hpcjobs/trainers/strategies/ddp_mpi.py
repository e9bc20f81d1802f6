"""`ddp --comm mpi`: gradients in one flat buffer, summed by MPI in chunks, where ranks own their cores.

On CPU nodes the process group's all-reduce is a thread of gloo that takes a core from the computation. MPI sums in the
memory that ranks of a node share, and wants no thread. It waits by spinning, so with cores that are shared it would
take them from whom it waits for: then, and where MPI is not there, DDP itself is used, and that is said.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from hpcjobs.runtime.exits import UsageError, WorldMismatch
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed.cpu_affinity import crowded
from hpcjobs.trainers.distributed.mpi import Mpi
from hpcjobs.trainers.distributed.process_group import Group
from hpcjobs.trainers.strategies.base import Strategy, Traffic
from hpcjobs.trainers.strategies.ddp import Ddp
from hpcjobs.trainers.strategies.ddp_scratch import Bucket, into_buckets
from hpcjobs.trainers.workloads.base import Workload

CHUNKS = tuple(1 << power for power in (18, 20, 22, 24))
"""Bytes summed by one call; which of them is timed before the first step."""
_ROUNDS = 4
_TRIALS = 4  # steps of either kind before the quicker one is kept


def ddp(flags: DdpFlags) -> Strategy:
    """The strategy that ``--comm`` asks for."""
    return DdpOverMpi(flags) if flags.comm == "mpi" else Ddp(flags)


class DdpOverMpi(Ddp):
    """DDP's place in every respect; without MPI, DDP itself."""

    def __init__(self, flags: DdpFlags) -> None:
        super().__init__(flags)
        self.gradients: FlatGradients | None = None

    def wrap(self, model: nn.Module, *, group: Group, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        if self.flags.compress != "none":
            raise UsageError(f"--compress {self.flags.compress} is of --comm group: over MPI gradients travel whole")
        try:
            _refuse(model, group)
            mpi = Mpi.of(group)
        except WorldMismatch as why:
            group.say(f"--comm mpi: {why.message}; gradients travel by {group.backend}")
            return super().wrap(model, group=group, workload=workload, dtype=dtype)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        self.gradients = FlatGradients([p for p in model.parameters() if p.requires_grad], mpi, group)
        self.backend = "mpi"
        group.say(f"--comm mpi: {mpi.library}, chunks of {self.gradients.chunk_bytes >> 10:,} KiB")
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return super().no_sync(model) if self.gradients is None else self.gradients.staying()

    def after_backward(self, model: nn.Module) -> None:
        if self.gradients is None:
            super().after_backward(model)
        else:
            self.gradients.land()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return super().model_state(model) if self.gradients is None else Strategy.model_state(self, model)

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        (Ddp if self.gradients is None else Strategy).load_model_state(self, model, state)

    def traffic(self, model: nn.Module) -> Traffic | None:
        return super().traffic(model) if self.gradients is None else self.gradients.traffic()


def _refuse(model: nn.Module, group: Group) -> None:
    """Where the process group is the better choice (WorldMismatch, on all ranks): why."""
    if group.world_size == 1:
        raise WorldMismatch("one rank has nobody to sum with")
    if any(True for _ in model.buffers()):
        raise WorldMismatch("the model has buffers, such as BatchNorm's, which DDP sends around")
    mine = (torch.get_num_threads(), os.sched_getaffinity(0))
    everyone = cast(list[tuple[int, set[int]]], group.gather(mine))
    if any(True for _ in crowded(group.hosts, everyone)):
        raise WorldMismatch("ranks share cores")


class Chunk(NamedTuple):
    """A part of a bucket's buffer that is summed by one call, and how many gradients it waits for."""

    values: torch.Tensor
    after: int


class FlatGradients:
    """All gradients in one buffer (per dtype), the last layer's first: the order in which backward completes them.

    Backward makes each gradient by itself, and its share of the mean is written into the buffer while it is still in
    the cache: one pass over memory, where a buffer that backward adds to is cleared, added to and divided.

    Either they are summed after the backward pass, or by a thread during it, chunk by chunk as gradients arrive. Both
    give the same sums. Where every rank has a core more than its threads take, the first steps try both in turn, and
    the quicker one is kept; without, the thread's waiting, which spins, would take the backward pass its core.
    """

    def __init__(self, parameters: list[nn.Parameter], mpi: Mpi, group: Group) -> None:
        self._mpi, self._group = mpi, group
        self._buckets = into_buckets(parameters, float("inf"))
        self.chunk_bytes = min(CHUNKS, key=self._seconds)
        self._chunks = list(_cut(self._buckets, self.chunk_bytes))
        self._parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._views = [view for bucket in self._buckets for view in bucket.views]
        self._arrived = [False] * len(self._parameters)
        self._complete = 0  # gradients from the front that have all arrived
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._staying = False
        spare = len(os.sched_getaffinity(0)) > torch.get_num_threads()
        self._during: bool | None = False if group.max(torch.tensor(float(not spare))) else None
        self._took: dict[bool, list[float]] = {False: [], True: []}
        self._landed = time.perf_counter()
        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(place))  # type: ignore[no-untyped-call]

    def _seconds(self, chunk_bytes: int) -> float:
        """For the whole buffer in chunks of this size: the best of some rounds, on the slowest rank."""
        chunks = list(_cut(self._buckets, chunk_bytes))
        best = float("inf")
        for _ in range(_ROUNDS):
            self._group.barrier()
            began = time.perf_counter()
            for chunk in chunks:
                self._mpi.sum(chunk.values)
            best = min(best, time.perf_counter() - began)
        return float(self._group.max(torch.tensor(best)))

    @property
    def during(self) -> bool:
        """Whether this pass's gradients travel while it runs: in turns, until it is known what is quicker."""
        return len(self._took[False]) > len(self._took[True]) if self._during is None else self._during

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Inside, gradients add up on each rank, and stay."""
        before, self._staying = self._staying, True
        try:
            yield
        finally:
            self._staying = before

    def _hook(self, place: int) -> Callable[[torch.Tensor], None]:
        def completed(_: torch.Tensor) -> None:
            if not self._staying:
                self._take(place)
                if self.during:
                    self._send()

        return completed

    def _take(self, place: int) -> None:
        """This rank's part of the mean, from the gradient into the buffer; zero where there is no gradient."""
        parameter, view = self._parameters[place], self._views[place]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.div(parameter.grad, self._group.world_size, out=view)
        parameter.grad = view
        self._arrived[place] = True

    def _send(self) -> None:
        """Let the thread know how far it may go."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._sum_all, name="gradients-over-mpi", daemon=True)
            self._worker.start()
        complete = self._complete
        while complete < len(self._arrived) and self._arrived[complete]:
            complete += 1
        self._tell(complete)

    def _tell(self, complete: int) -> None:
        with self._changed:
            self._complete = complete
            self._changed.notify()

    def _sum_all(self) -> None:
        """All chunks in the same order on every rank, each as soon as its gradients are there."""
        for chunk in self._chunks:
            with self._changed:
                self._changed.wait_for(lambda after=chunk.after: self._complete >= after)  # type: ignore[misc]
            self._mpi.sum(chunk.values)

    @torch.no_grad()
    def land(self) -> None:
        """All gradients are here; those that the pass did not need count as zero."""
        for place, arrived in enumerate(self._arrived):
            if not arrived:
                self._take(place)
        if self._worker is not None:
            self._tell(len(self._arrived))
            self._worker.join()
        else:
            for chunk in self._chunks:
                self._mpi.sum(chunk.values)
        if self._during is None:
            self._try(during=self._worker is not None)
        self._worker, self._complete = None, 0
        self._arrived = [False] * len(self._arrived)

    def _try(self, *, during: bool) -> None:
        now = time.perf_counter()
        self._took[during].append(now - self._landed)
        self._landed = now
        if min(map(len, self._took.values())) == _TRIALS:
            best = torch.tensor([min(self._took[False]), min(self._took[True])])
            after_s, during_s = self._group.max(best).tolist()
            self._during = during_s < after_s
            self._group.say(f"--comm mpi: gradients travel {'during' if self._during else 'after'} the backward pass")

    def traffic(self) -> Traffic:
        sizes = [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self._buckets]
        return Traffic(bytes=sum(sizes), calls=len(self._chunks))


def _cut(buckets: list[Bucket], chunk_bytes: int) -> Iterator[Chunk]:
    """The buffers in chunks; each waits for every gradient from the front up to its own last one."""
    before = 0
    for bucket in buckets:
        ends = torch.tensor([p.numel() for p in bucket.parameters]).cumsum(0)
        first = 0
        for values in bucket.buffer.split(max(1, chunk_bytes // bucket.buffer.element_size())):  # type: ignore[no-untyped-call]
            first += values.numel()
            yield Chunk(values, before + int(torch.searchsorted(ends, first)) + 1)
        before += len(bucket.parameters)
