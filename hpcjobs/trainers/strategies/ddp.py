"""torch's DistributedDataParallel behind the strategy's verbs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.strategies.base import Strategy, Traffic
from hpcjobs.trainers.strategies.compress import HALVES, compress
from hpcjobs.trainers.workloads.base import Workload


class Ddp(Strategy):
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
        """A static graph is recorded by passes that synchronise: those of the first step all do. That moves more bytes
        and gives the same gradients, since the mean of what is the same on all ranks is itself."""
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
    """The model itself, so that a checkpoint of one strategy loads under another."""
    assert isinstance(model, DistributedDataParallel)
    inner: nn.Module = model.module
    return inner
