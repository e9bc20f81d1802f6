"""torch's fully_shard behind the strategy's verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.core.group import Group
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.strategies.base import Strategy, blocks_of
from hpcjobs.trainers.workloads.base import Workload


class Fsdp(Strategy):
    name = "fsdp"
    autocasts = False
    in_parts = True

    def __init__(self, flags: FsdpFlags) -> None:
        self.flags = flags

    def wrap(self, model: nn.Module, *, group: Group, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Each block by itself, then what is left; weights compute in `dtype`, gradients sum in fp32."""
        if dtype is torch.float16:
            raise UsageError("--precision fp16 needs a loss scale per shard", hint="--precision bf16")
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            dtype, self.autocasts = None, True  # its statistics stay fp32, and so must its weights
        mesh = self._mesh(group)
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # all that it takes
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for parent, name, block in list(blocks_of(model, workload.blocks)):
            if self.flags.activation_checkpointing:
                block = checkpoint_wrapper(block)
                setattr(parent, name, block)
            fully_shard(block, reshard_after_forward=self.flags.reshard_after_forward, **settings)
        return cast(nn.Module, fully_shard(model, **settings))

    def _mesh(self, group: Group) -> DeviceMesh:
        """One dimension, or replicas × shards: gradients are then summed over the replicas as in DDP."""
        size, shards = group.world_size, self.flags.shard_size
        if shards is None or shards == size:
            return init_device_mesh(group.device.type, (size,))
        if size % shards:
            raise UsageError(f"--shard-size {shards} does not divide the world size {size}")
        return init_device_mesh(group.device.type, (size // shards, shards), mesh_dim_names=("replicate", "shard"))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, parameters: Any, max_norm: float) -> torch.Tensor:
        norm = super().clip(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        return {plain(name): value for name, value in model.state_dict().items()}

    def placed(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, where: tuple[str | int, ...]
    ) -> torch.Tensor | None:
        if where[0] == "model":
            mine = self.model_state(model)[str(where[1])]
        else:
            parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
            mine = parameters[int(where[2])]
        return torch.empty_like(mine) if isinstance(mine, DTensor) else None

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        parts = {name: like(state[plain(name)], mine) for name, mine in model.state_dict().items()}
        model.load_state_dict(parts)

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Parameters have the same numbers sharded and whole, so each state follows its parameter."""
        parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
        for number, values in state["state"].items():
            mine = parameters[number]
            state["state"][number] = {
                key: like(value, mine) if value.shape == mine.shape else value for key, value in values.items()
            }
        optimizer.load_state_dict(state)


def plain(name: str) -> str:
    """The name in the model as it was before activation checkpointing wrapped its blocks."""
    return name.replace("_checkpoint_wrapped_module.", "")


def like(value: torch.Tensor, mine: Any) -> torch.Tensor:
    """This rank's part of a whole tensor, laid out as `mine` is; a value in parts is that already."""
    if isinstance(value, DTensor) or not isinstance(mine, DTensor):
        return value
    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
