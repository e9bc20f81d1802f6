"""The interface of strategies; its defaults fit a model that is complete on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcjobs.runtime.exits import UnequalData
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.workloads.base import GroupedParameters, Workload, group_parameters

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Traffic(NamedTuple):
    """Of one optimizer step and one rank: gradient bytes handed to collectives, and their number."""

    bytes: int
    calls: int | None  # None: differs from step to step


class Strategy:
    """How ranks share a model and its gradients; this one is of a single rank."""

    name = "single"
    backend: str | None = None  # the library that carries gradients, if not the process group's
    quiet_passes = False  # a pass inside quiet() differs from another by its communication alone
    builds_skeleton = False  # `wrap` takes a model on the meta device, whose weights come afterwards
    fills = True  # ranks repeat samples, so that the last batches of an epoch have equal sizes
    in_parts = False  # the states below hold DTensors, and each rank saves its parts
    holds_shards = False  # a rank has a part of each gradient, and does not see overflows in other parts
    autocasts = True  # lower precision comes by autocast around the forward pass

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Spread `model`, which is on the device, equal on all ranks. Called once.

        `dtype` is the lower precision to compute in, for a strategy that does not autocast.
        """
        return model

    def quiet_pass_bytes(self, model: nn.Module) -> int:
        """Return the bytes that a pass inside quiet() needs in addition to a step."""
        return 0

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that the optimizer steps: here the model's."""
        return list(model.parameters())

    def named_parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters with the names that they had before `wrap`."""
        return list(model.named_parameters())

    def parameter_groups(self, model: nn.Module, workload: Workload) -> GroupedParameters:
        """Return the parameters that the optimizer steps, in the workload's groups."""
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
        """Inside, a pass does not communicate; its gradients are not to be used."""
        return self.no_sync(model)

    def after_backward(self, model: nn.Module) -> None:
        """After the backward pass that synchronises, before the optimizer."""

    def join(self, model: nn.Module, loss: torch.Tensor | None) -> torch.Tensor:
        """End an epoch without repeated samples: ranks that ran out one step earlier have no loss.

        A collective call; returns the mean loss of the other ranks.

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
        """Drop the weights gathered from shards, after parameters changed outside of a step."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state, complete on rank 0 or in parts; a collective call if parts are gathered."""
        return model.state_dict()

    def allocate_shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, where: tuple[str | int, ...]
    ) -> torch.Tensor | None:
        """Return the tensor into which a sharded tensor is read; None: it is read complete.

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
        """Return the traffic, known after a few steps; None if it can't be known."""
        return None


def blocks_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Each of the workload's blocks."""
    yield from (module for module in model.modules() if module is not model and isinstance(module, kinds))


def find_blocks(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the class of the repeated modules: at least two in containers, with the most weights of all such classes.

    Models of transformers name their classes. Empty if no class holds half of the weights: the model is one unit then.
    """
    named = getattr(model, "_no_split_modules", None)
    kinds = {type(module) for module in model.modules() if type(module).__name__ in (named or ())}
    if kinds:
        return tuple(sorted(kinds, key=lambda kind: kind.__name__))
    weights: dict[type[nn.Module], dict[nn.Parameter, int]] = {}
    counts: Counter[type[nn.Module]] = Counter()
    for parent in model.modules():
        for child in parent.children() if isinstance(parent, CONTAINERS) else ():
            if next(child.children(), None) is not None and not isinstance(child, CONTAINERS):
                counts[type(child)] += 1
                weights.setdefault(type(child), {}).update({p: p.numel() for p in child.parameters()})
    sizes = {kind: sum(held.values()) for kind, held in weights.items() if counts[kind] > 1}
    best = max(sizes, key=lambda kind: (sizes[kind], counts[kind]), default=None)
    if best is None or 2 * sizes[best] < sum(parameter.numel() for parameter in model.parameters()):
        return ()
    return (best,)


def choose_blocks(model: nn.Module, workload: Workload, group: RankGroup) -> tuple[type[nn.Module], ...]:
    """Return the workload's blocks; if it has none, the blocks found in the model, which are logged."""
    if workload.blocks:
        return workload.blocks
    kinds = find_blocks(model)
    names = " and ".join(kind.__name__ for kind in kinds)
    group.log(f"blocks: {names}, which repeats" if kinds else "blocks: none, the model is one unit")
    return kinds
