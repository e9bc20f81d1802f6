"""Horovod's DistributedOptimizer behind the strategy's verbs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.horovod import HorovodFlags
from hpcjobs.trainers.strategies.base import Strategy, Traffic
from hpcjobs.trainers.strategies.horovod_world import hvd, make_contiguous, start
from hpcjobs.trainers.workloads.base import Workload


class Horovod(Strategy):
    """Data parallelism by Horovod: its optimizer averages the gradients."""

    name = "horovod"

    def __init__(self, flags: HorovodFlags) -> None:
        self.flags = flags
        self.quiet_passes = not (flags.adasum or flags.join)
        self.fills = not flags.join
        self.distributed: Any = None  # Horovod's optimizer: it hooks the gradients

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Start Horovod on the ranks that have met, and send rank 0's weights to all."""
        self._refuse_adasum_with(dtype, group)
        _export_setting("HOROVOD_FUSION_THRESHOLD", self.flags.fusion_threshold_mb, unit=1 << 20)
        _export_setting("HOROVOD_CYCLE_TIME", self.flags.cycle_time_ms)
        self.backend = start(
            group.env, group.hosts, controller=self.flags.controller, share=group.from_first, log=group.log
        )
        if self.flags.adasum and self.backend != "horovod-mpi":
            raise UsageError("--adasum works over MPI alone", hint="--launcher mpirun, or a site with mpi: pmix")
        make_contiguous(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    def _refuse_adasum_with(self, dtype: torch.dtype | None, group: RankGroup) -> None:
        if self.flags.adasum and dtype is torch.float16:
            raise UsageError("--adasum steps before a loss scale could be taken back", hint="--precision bf16")
        if self.flags.adasum and self.flags.join:
            raise UsageError("--adasum weighs the steps of all ranks: there is no --join with it")
        if self.flags.adasum and group.world_size & (group.world_size - 1):
            raise UsageError(f"--adasum needs 2, 4, 8, … ranks, not {group.world_size}")

    def optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        self.distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if self.flags.compress == "fp16" else hvd.Compression.none,
            op=hvd.Adasum if self.flags.adasum else hvd.Average,
        )
        wrapped: torch.optim.Optimizer = self.distributed
        return wrapped

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Raise Horovod's passes per step to two, which one pass does not reach, so gradients add up."""
        before = self.distributed.backward_passes_per_step
        self.distributed.set_backward_passes_per_step(2)
        try:
            yield
        finally:
            self.distributed.set_backward_passes_per_step(before)

    def after_backward(self, model: nn.Module) -> None:
        self.distributed.synchronize()

    def stepping(self) -> AbstractContextManager[None]:
        """Gradients are averaged already, before they were clipped."""
        if self._adasum_steps:
            return nullcontext()
        quiet: AbstractContextManager[None] = self.distributed.skip_synchronize()
        return quiet

    @property
    def _adasum_steps(self) -> bool:
        return self.flags.adasum and int(hvd.size()) > 1

    def join(self, model: nn.Module, loss: torch.Tensor | None) -> torch.Tensor:
        """Add zeros to the gradients of the other ranks until all are here; then take their weights over.
        The one that joins last has made every step."""
        last = hvd.join()
        hvd.broadcast_optimizer_state(self.distributed, root_rank=last)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        mine = torch.zeros(2) if loss is None else torch.stack([loss.detach().cpu(), torch.ones(())])
        total, ranks = hvd.allreduce(mine, op=hvd.Sum, name="loss of the last step").unbind()
        mean: torch.Tensor = total / ranks
        return mean

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        torch.optim.Optimizer.zero_grad(optimizer)  # Horovod's own refuses gradients that were never sent

    def clip(self, parameters: Any, max_norm: float) -> torch.Tensor:
        if self._adasum_steps:
            raise UsageError("--adasum steps while gradients still arrive: there is nothing to clip with --clip-norm")
        return super().clip(parameters, max_norm)

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the state, and send rank 0's state and weights to all. To send an empty state would make a step."""
        optimizer.load_state_dict(state)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if optimizer.state:
            for values in optimizer.state.values():  # of a trainer with another layout
                values.update({name: v.contiguous() for name, v in values.items() if isinstance(v, torch.Tensor)})
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def traffic(self, model: nn.Module) -> Traffic | None:
        """Fusion is decided as gradients arrive, so the number of calls is not known."""
        width = 2 if self.flags.compress == "fp16" else 4
        return Traffic(bytes=width * sum(p.numel() for p in model.parameters() if p.requires_grad), calls=None)


def _export_setting(name: str, value: float | None, *, unit: int | None = None) -> None:
    """A setting that Horovod reads from the environment when it starts."""
    if value is not None:
        os.environ[name] = str(value) if unit is None else str(int(value * unit))
