"""What a strategy may decide; the defaults are those of a model that is whole on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcjobs.runtime.exits import UnequalData
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.workloads.base import Workload
from hpcjobs.trainers.workloads.parameters import GroupedParameters, group_parameters


class Traffic(NamedTuple):
    """Of one optimizer step and one rank: gradient bytes handed to collectives, and their number."""

    bytes: int
    calls: int | None  # None: settled anew in each step


class Strategy:
    name = "single"
    backend: str | None = None  # what carries gradients, where it is not the process group
    quiet_passes = False  # a pass inside quiet() differs from another by its communication alone
    fills = True  # ranks repeat a sample where the last batches of an epoch would not be equally many
    in_parts = False  # the states below are of DTensors, and each rank saves its own parts
    holds_shards = False  # a rank has a part of each gradient: it does not see where those of others overflow
    autocasts = True  # lower precision comes by autocast around the forward pass

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Spread `model`, which is on the device, equal on all ranks. Called once.

        `dtype` is the lower precision to compute in, for a strategy that does not autocast.
        """
        return model

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """What the optimizer steps: here the model's own."""
        return list(model.parameters())

    def named_parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """With the names that they had before `wrap`."""
        return list(model.named_parameters())

    def parameter_groups(self, model: nn.Module, workload: Workload) -> GroupedParameters:
        """What the optimizer steps, by the workload's groups."""
        return group_parameters(self.named_parameters(model), workload)

    def optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer to step, made of the workload's own. Called once, after `wrap`."""
        return optimizer

    def scaler(self, device_type: str, *, enabled: bool) -> torch.amp.GradScaler:
        """Scales the loss for fp16. All ranks must skip the same steps, so all must see the same overflows."""
        return torch.amp.GradScaler(device_type, enabled=enabled)

    def stepping(self) -> AbstractContextManager[None]:
        """Around each step of the optimizer."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a backward pass leaves gradients local."""
        return nullcontext()

    def quiet(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a pass talks to nobody; its gradients are not to be used."""
        return self.no_sync(model)

    def after_backward(self, model: nn.Module) -> None:
        """After the backward pass that synchronises, before the optimizer."""

    def join(self, model: nn.Module, loss: torch.Tensor | None) -> torch.Tensor:
        """Where samples are not repeated: the end of an epoch, which ranks without a batch (no loss) reach
        a step early. A collective call; the mean loss of the others.

        Raises:
            UnequalData: the strategy repeats samples, so no rank should have run out of them first.
        """
        raise UnequalData(
            "a rank ran out of samples before the others", hint="every rank has to see the same --data or --text"
        )

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of at most `max_norm`; the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def drop_gathered(self, model: nn.Module) -> None:
        """After the parameters changed outside of a step: drop what was gathered from their shards."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Whole on rank 0, or in parts; a collective call where parts are put together."""
        return model.state_dict()

    def allocate_shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, where: tuple[str | int, ...]
    ) -> torch.Tensor | None:
        """What a tensor saved in parts is read into; None: read it whole.

        `where` is ("model", name) or ("optimizer", "state", number of the parameter, name).
        """
        return None

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        model.load_state_dict(state)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def traffic(self, model: nn.Module) -> Traffic | None:
        """Known after a few steps; None where it can't be known."""
        return None


def blocks_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and module of each of the workload's blocks."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if kinds and isinstance(child, kinds):
                yield parent, name, child


def fits_unsharded(model: nn.Module, group: RankGroup) -> bool:
    """Whether every rank here could hold whole weights and gradients for a moment."""
    needed_bytes = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if group.device.type == "cuda":
        return needed_bytes < torch.cuda.mem_get_info(group.device)[0]
    return needed_bytes * group.env.local_world_size < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
