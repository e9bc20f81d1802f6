"""One unit of sharding: the weights of a module end to end in one vector, of which each rank keeps a part.

Between uses a unit is its shard alone. `gather` makes the whole vector and lets the module's parameters
be views of it; `drop` frees it again. Freeing empties the storage but keeps the object: what autograd
saved for the backward pass still points there, and finds the same numbers after the next gather.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

# the names before and after torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

STEPS = "step"
"""torch's name for the number of steps in an optimizer's state: of a scalar parameter all else looks alike."""


class FlatUnit:
    def __init__(self, parameters: list[nn.Parameter], *, rank: int, world_size: int) -> None:
        """`parameters` have one dtype, and are all trained or all frozen."""
        self.trained = parameters[0].requires_grad
        self.parameters, self.rank, self.world_size = parameters, rank, world_size
        self.sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(self.sizes) // world_size)  # of each rank; the last one's is filled up with zeros
        first = parameters[0]
        self.full = torch.zeros(part * world_size, dtype=first.dtype, device=first.device)
        for parameter, view in zip(parameters, self.split(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = nn.Parameter(self.full[rank * part : (rank + 1) * part].clone(), requires_grad=self.trained)
        self.present = True
        self.stays_gathered = False  # whatever happens, the whole vector stays
        self.arriving: dist.Work | None = None
        self.leaving: dist.Work | None = None
        self.gradients: torch.Tensor | None = None
        self.waiting = len(parameters)  # gradients that this pass has not completed
        self.closed = False  # this pass needs the unit no more

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a whole vector in the parameters' shapes."""
        parts = flat[: sum(self.sizes)].split(self.sizes)  # type: ignore[no-untyped-call]
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def request(self) -> None:
        """Start the all-gather: (n-1)/n of the unit's bytes come in."""
        if self.present or self.arriving is not None:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.arriving = ALL_GATHER(self.full, self.shard.detach(), async_op=True)

    def gather(self) -> None:
        """The whole vector, here and now."""
        self.request()
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving, self.present = None, True

    def drop(self) -> None:
        """Keep the shard alone."""
        if self.present and not self.stays_gathered:
            self.full.untyped_storage().resize_(0)
            self.present = False

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Start the reduce-scatter: (n-1)/n of the bytes go out, and this rank's part of the mean stays."""
        flat = torch.zeros(self.full.shape, dtype=self.full.dtype, device=self.full.device)
        for parameter, view in zip(self.parameters, self.split(flat), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        flat.div_(self.world_size)
        self.gradients, self.shard.grad = flat, torch.empty_like(self.shard)
        self.leaving = REDUCE_SCATTER(self.shard.grad, flat, async_op=True)

    def land(self) -> None:
        """Wait until this rank's part of the gradient is here."""
        if self.leaving is not None:
            self.leaving.wait()
            self.leaving = self.gradients = None

    @torch.no_grad()
    def keep_own_part(self) -> None:
        """After the whole vector was written: the shard follows it."""
        part = self.shard.numel()
        self.shard.copy_(self.full[self.rank * part : (self.rank + 1) * part])

    def whole_parts(self, value: torch.Tensor) -> list[torch.Tensor]:
        """A value laid out as the shard, put together and cut by parameter; any other, once for each."""
        if value.shape != self.shard.shape:
            return [value.clone() for _ in self.parameters]
        full = torch.empty(self.full.shape, dtype=value.dtype, device=self.full.device)
        ALL_GATHER(full, value)
        return self.split(full)

    def own_parts(self, states: list[dict[str, torch.Tensor] | None]) -> dict[str, torch.Tensor]:
        """The inverse of `whole_parts`, of the states of the unit's parameters; None: one that was never stepped.

        Its values are zeros, as they would be here. What is not laid out as the parameters, such as the number of
        steps, is one value for the unit.
        """
        names = {name: value for values in states for name, value in (values or {}).items()}
        return {
            name: self._own_part([None if values is None else values.get(name) for values in states], dtype=value.dtype)
            if name != STEPS and self._is_laid_out(name, states)
            else torch.stack([values[name] for values in states if values and name in values]).max()
            if value.dim() == 0
            else value.clone()
            for name, value in names.items()
        }

    def _is_laid_out(self, name: str, states: list[dict[str, torch.Tensor] | None]) -> bool:
        return all(
            values is None or name not in values or values[name].shape == parameter.shape
            for values, parameter in zip(states, self.parameters, strict=True)
        )

    def _own_part(self, values: list[torch.Tensor | None], *, dtype: torch.dtype) -> torch.Tensor:
        full = torch.zeros(self.full.shape, dtype=dtype)
        for view, value in zip(self.split(full), values, strict=True):
            if value is not None:
                view.copy_(value)
        part = self.shard.numel()
        return full[self.rank * part : (self.rank + 1) * part].clone()
