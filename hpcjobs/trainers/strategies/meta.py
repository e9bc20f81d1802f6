"""Builds models whose weights take no memory until they are sharded.

Every rank builds the model on torch's meta device: names and shapes, no memory. Once it is sharded, each rank
allocates its parts, and the weights arrive one tensor at a time from rank 0, which alone holds them all, in host
memory. They are those that every rank would have built from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from hpcjobs.runtime.exits import PeerLost
from hpcjobs.trainers.distributed.process_group import RankGroup

NOT_PLAIN = ("_parameters", "_buffers", "_modules")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and its weights on rank 0."""

    model: nn.Module
    weights: Tensors | None  # by name, in host memory; None on all other ranks


def build_skeleton(build: Callable[[], nn.Module], group: RankGroup) -> Skeleton | str:
    """The model without memory, or why it cannot be built so; a collective call. `build` begins with its own seed.

    Raises:
        PeerLost: rank 0, which builds the weights, failed at it.
    """
    model, problem = _build_on_meta(build)
    weights: Tensors | None = None
    failure: Exception | None = None
    if problem is None and model is not None and group.rank == 0:
        try:
            weights = {name: tensor.detach() for name, tensor in list_tensors(build())}
        except Exception as error:  # raised below, once no rank waits for this one
            failure = error
        else:
            if {name: t.shape for name, t in weights.items()} != {name: t.shape for name, t in list_tensors(model)}:
                problem = "it has other tensors when it is built again"
    answers = cast(list[tuple[str | None, bool]], group.gather((problem, failure is not None)))
    if failure is not None:
        raise failure
    if answers[0][1]:
        raise PeerLost("rank 0 cannot build the model", hint="its log says why")
    problems = [other for other, _ in answers if other is not None]
    return problems[0] if problems or model is None else Skeleton(model, weights)


def _build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module | None, str | None]:
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # often: it reads values. The complete model is built next, and raises what is a bug
        return None, (str(error) or type(error).__name__).splitlines()[0]
    plain = next(list_plain_tensors(model), None)
    if plain is not None:
        return model, f"{plain} is a tensor, but neither a parameter nor a buffer"
    return model, None if is_meta(model) else "it has tensors of its own"


def list_plain_tensors(model: nn.Module) -> Iterator[str]:
    """Names of the attributes that are tensors, or hold some: nothing moves, shards or saves them."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in NOT_PLAIN and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                yield f"{prefix}.{name}".lstrip(".")


def is_meta(model: nn.Module) -> bool:
    return all(tensor.is_meta for _, tensor in list_tensors(model))


def list_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, also those that no checkpoint has; tied ones once."""
    yield from chain(model.named_parameters(), model.named_buffers())


def materialize(model: nn.Module, weights: Tensors | None, group: RankGroup) -> None:
    """Allocate what this rank holds of a sharded skeleton, and fill it from rank 0; a collective call."""
    received: dict[torch.Tensor | None, torch.Tensor | None] = {
        None: None
    }  # by what it replaces: tied weights stay tied
    for name, tensor in list(list_tensors(model)):
        value = _receive(tensor, None if weights is None else weights[name], group)
        is_parameter = isinstance(tensor, nn.Parameter)
        received[tensor] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for place in places:
            place.update({name: received[tensor] for name, tensor in place.items()})


@torch.no_grad()
def _receive(tensor: torch.Tensor, source: torch.Tensor | None, group: RankGroup) -> torch.Tensor:
    """This rank's part of rank 0's tensor, laid out as `tensor` is; for that moment each rank has the whole tensor."""
    if source is None:
        complete = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.device)
    else:
        complete = source.to(group.device, memory_format=torch.contiguous_format)
    if isinstance(tensor, DTensor):
        return distribute_tensor(complete, tensor.device_mesh, tensor.placements)
    if group.world_size > 1:
        dist.broadcast(complete, src=0)
    return complete
