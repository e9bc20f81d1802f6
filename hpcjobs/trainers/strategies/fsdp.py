"""torch's fully_shard behind the strategy's verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.strategies import Strategy, Traffic, blocks_of, choose_blocks
from hpcjobs.trainers.workloads.base import Workload


class Fsdp(Strategy):
    """PyTorch's FSDP2: each rank holds a part of each weight, gradient and state of the optimizer."""

    name = "fsdp"
    autocasts = False
    builds_skeleton = True
    in_parts = True
    holds_shards = True

    def __init__(self, flags: FsdpFlags) -> None:
        self.flags = flags

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Shard each block, then the rest. Weights compute in `dtype`, gradients are summed in fp32, and the model's
        outputs are cast to fp32 for the loss."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            dtype, self.autocasts = None, True  # its statistics stay fp32, and so must its weights
        require_streams(group.device)
        scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise UsageError(
                f"fsdp: {scalars[0]} is a parameter without a dimension, which torch's fully_shard does not shard",
                hint="make it a tensor of one element, nn.Parameter(torch.ones(1)), or use fsdp_scratch or ddp",
            )
        able = hasattr(FSDPModule, "set_reshard_after_forward")  # torch 2.6 has FSDP2 without it
        self.quiet_passes = able and dtype is None
        mesh = self._mesh(group)
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # all that it takes
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        self._dtype, self._replicated = dtype, mesh.ndim > 1
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for block in list(blocks_of(model, choose_blocks(model, workload, group))):
            fully_shard(block, reshard_after_forward=self.flags.reshard_after_forward, **settings)
        outermost = replace(policy, output_dtype=torch.float32 if dtype else None)
        return cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=outermost))

    def quiet_pass_bytes(self, model: nn.Module) -> int:
        """Return the bytes of complete weights and gradients: a step has only some blocks of them."""
        return 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    def _mesh(self, group: RankGroup) -> DeviceMesh:
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

    @contextmanager
    def quiet(self, model: nn.Module) -> Iterator[None]:
        """Inside, all weights stay gathered."""
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        try:
            with self.no_sync(model):
                yield
        finally:
            for parameter in model.parameters():  # the whole ones: they are not the optimizer's
                parameter.grad = None
            for unit in units:
                unit.set_reshard_after_forward(unit is not model and self.flags.reshard_after_forward, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)
                unit.reshard()

    def traffic(self, model: nn.Module) -> Traffic:
        """Weights are gathered forward, and backward where they were dropped; gradients are scattered in fp32 where
        weights are of lower precision, and summed over replicas of a shard."""
        seen: set[nn.Parameter] = set()
        bytes_ = calls = 0
        for unit in [module for module in reversed(list(model.modules())) if isinstance(module, FSDPModule)]:
            own = set(cast(nn.Module, unit).parameters()) - seen
            if not own:
                continue
            seen |= own
            gathers = 1 + (unit is not model and self.flags.reshard_after_forward)
            for parameter in own:
                size = parameter.numel() * parameter.element_size()
                shard = parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
                bytes_ += gathers * parameter.numel() * (self._dtype or parameter.dtype).itemsize
                bytes_ += size + self._replicated * shard * parameter.element_size()
            calls += gathers + 1 + self._replicated
        return Traffic(bytes=bytes_, calls=calls)

    def clip(self, parameters: Any, max_norm: float) -> torch.Tensor:
        norm = super().clip(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def drop_gathered(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def allocate_shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, where: tuple[str | int, ...]
    ) -> torch.Tensor | None:
        if where[0] == "model":
            mine = self.model_state(model)[str(where[1])]
        else:
            parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
            mine = parameters[int(where[2])]
        return torch.empty_like(mine) if isinstance(mine, DTensor) else None

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        parts = {name: like(state[name], mine) for name, mine in model.state_dict().items()}
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


def like(value: torch.Tensor, mine: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor, laid out as `mine`; return a sharded value unchanged."""
    if isinstance(value, DTensor) or not isinstance(mine, DTensor):
        return value
    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)


def require_streams(device: torch.device) -> None:
    """Refuse CPUs where torch's fully_shard asks their streams for events that they do not have, as in torch 2.6.

    Raises UsageError: this torch has fully_shard for GPUs alone; the message names alternatives.
    """
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise UsageError(
            f"torch {torch.__version__} has fully_shard for GPUs alone: on CPUs use fsdp_scratch, or a newer torch"
        )
