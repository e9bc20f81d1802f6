"""Shards weights, gradients and moments over the ranks, written from primitives.

Adam keeps 4 values per weight: itself, its gradient and two moments, 16 bytes in fp32. Data parallelism
keeps all of them on every rank; here a rank keeps 1/n of each, and a block's weights are whole only while
it computes. The cost is communication: with S bytes of weights and n ranks,

    forward     all-gather of each unit           (n-1)/n · S
    backward    all-gather of each block again    (n-1)/n · S    (not with --no-reshard-after-forward)
    backward    reduce-scatter of the gradients   (n-1)/n · S

so 3·(n-1)/n·S per rank and step where data parallelism moves 2·(n-1)/n·S. The next unit's all-gather
travels while this one computes, and so do the gradients of the one before.

A unit of sharding is one flat vector with the weights of a module; each rank keeps a part of it.

Between uses a unit is its shard alone. `gather` makes the whole vector and lets the module's parameters
be views of it; `drop` frees it again. Freeing empties the storage but keeps the object: tensors
that autograd saved for the backward pass still use it, and have the same values after the next gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.fsdp_scratch import FsdpScratchFlags
from hpcjobs.trainers.strategies import Strategy, Traffic, blocks_of, choose_blocks
from hpcjobs.trainers.workloads.base import GroupedParameters, Workload, group_parameters

# the names before and after torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

STEPS = "step"
"""torch's key for the number of steps in an optimizer's state, which has the shape of a scalar parameter's moments."""


class FlatUnit:
    """Parameters that are gathered together as one flat tensor; each rank holds an equal part."""

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
        """Gather the whole vector, and wait for it."""
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
        """Copy this rank's part of the whole vector into the shard."""
        part = self.shard.numel()
        self.shard.copy_(self.full[self.rank * part : (self.rank + 1) * part])

    def whole_parts(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Gather a value of the shard's shape and split it by parameter; copy any other value for each parameter."""
        if value.shape != self.shard.shape:
            return [value.clone() for _ in self.parameters]
        full = torch.empty(self.full.shape, dtype=value.dtype, device=self.full.device)
        ALL_GATHER(full, value)
        return self.split(full)

    def own_parts(self, states: list[dict[str, torch.Tensor] | None]) -> dict[str, torch.Tensor]:
        """Invert `whole_parts`: return this rank's part of the states of the unit's parameters.

        None is the state of a parameter that was never stepped: its values become zeros. Values of other shapes than
        the parameters, such as the number of steps, become one value for the unit.
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


class AgreeingGradScaler(torch.amp.GradScaler):
    """A step that overflows on one rank is skipped by all. torch's ShardedGradScaler does not fit fused optimizers."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        for found_inf in self._found_inf_per_device(optimizer).values() if self.is_enabled() else ():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)


class FsdpScratch(Strategy):
    """Sharded data parallelism by hand: each block of the model is gathered before it computes."""

    name = "fsdp_scratch"
    quiet_passes = True
    holds_shards = True

    def __init__(self, flags: FsdpScratchFlags) -> None:
        self.reshard = flags.reshard_after_forward
        self.blocks: list[list[FlatUnit]] = []  # in the order they compute: a unit of trained weights, one of frozen
        self.rest: list[FlatUnit] = []  # units of weights outside of blocks
        self.groups: GroupedParameters = []  # of the full parameters
        self.numbers: dict[nn.Parameter, int] = {}  # of full parameters, as an unsharded optimizer counts
        self._group_of: dict[nn.Parameter, int] = {}
        self.syncing = True
        self._complete_bytes = 0  # of all weights

    @property
    def units(self) -> list[FlatUnit]:
        return [*chain.from_iterable(self.blocks), *self.rest]

    @property
    def trained(self) -> list[FlatUnit]:
        """The trained units in the optimizer's order of shards: group by group."""
        order = {parameter: number for number, (_, group) in enumerate(self.groups) for parameter in group}
        return sorted((unit for unit in self.units if unit.trained), key=lambda unit: order[unit.parameters[0]])

    def wrap(self, model: nn.Module, *, group: RankGroup, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Equal weights to begin with; units per block and for the rest; hooks that gather and drop."""
        self._complete_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.groups = group_parameters(model.named_parameters(), workload)
        grouped = [(key, parameter) for key, (_, parameters) in enumerate(self.groups) for parameter in parameters]
        self.numbers = {parameter: number for number, (_, parameter) in enumerate(grouped)}
        self._group_of = {parameter: key for key, parameter in grouped}
        blocks = list(blocks_of(model, choose_blocks(model, workload, group)))
        inner = {parameter for block in blocks for parameter in block.parameters()}
        self.blocks = [self._units(block.parameters(), group) for block in blocks]
        self.rest = self._units((parameter for parameter in model.parameters() if parameter not in inner), group)
        for unit in chain.from_iterable(self.blocks):
            for parameter in unit.parameters if unit.trained else ():
                parameter.register_post_accumulate_grad_hook(self._make_hook(unit))  # type: ignore[no-untyped-call]
        for position, block in enumerate(blocks):
            self._gather_and_drop(block, position)
        model.register_forward_pre_hook(lambda *_: self._begin_forward())
        self._drop_all()
        return model

    def quiet_pass_bytes(self, model: nn.Module) -> int:
        """Return the bytes of complete weights and gradients: a step has only some blocks of them."""
        return 2 * self._complete_bytes

    def _units(self, parameters: Iterable[nn.Parameter], group: RankGroup) -> list[FlatUnit]:
        """Trained and frozen parameters, dtypes and groups apart: the optimizer steps a unit as one vector."""
        kinds: dict[tuple[bool, torch.dtype, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            kind = parameter.requires_grad, parameter.dtype, self._group_of[parameter]
            kinds.setdefault(kind, []).append(parameter)
        return [FlatUnit(kind, rank=group.rank, world_size=group.world_size) for kind in kinds.values()]

    def _begin_forward(self) -> None:
        """Gather the weights outside of blocks: they are needed first and last, and stay until backward is over."""
        for unit in self.units:
            unit.waiting, unit.closed = len(unit.parameters), False
        for unit in self.rest:
            unit.gather()

    def _gather_and_drop(self, block: nn.Module, position: int) -> None:
        units, last = self.blocks[position], position == len(self.blocks) - 1
        after = [] if last else self.blocks[position + 1]
        before = self.blocks[position - 1] if position > 0 else []

        def before_forward(*_: Any) -> None:
            for unit in units:
                unit.gather()
            for unit in after:
                unit.request()

        def after_forward(module: nn.Module, inputs: Any, outputs: Any) -> None:
            differentiable = [tensor for tensor in tree_leaves(outputs) if getattr(tensor, "requires_grad", False)]
            if differentiable:
                register_multi_grad_hook(differentiable, before_backward, mode="any")
            if self.reshard and not (last and torch.is_grad_enabled()):  # backward begins with the last
                for unit in units:
                    unit.drop()

        def before_backward(*_: Any) -> None:
            self._close(after)  # gradients that are not there by now do not come
            for unit in units:
                unit.gather()
            for unit in before:
                unit.request()

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def _make_hook(self, unit: FlatUnit) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if unit.closed:
                raise RuntimeError("a gradient was added after its unit was sent: is a weight used by several blocks?")
            unit.waiting -= 1
            if unit.waiting == 0:
                self._close([unit])

        return hook

    def _close(self, units: Iterable[FlatUnit]) -> None:
        """This pass has all gradients of these units, and needs their weights no more.

        All ranks issue the collectives in the same order, even if they used different parameters: a block's units are
        closed before the backward pass of the preceding block begins, and the units outside of blocks come last.
        """
        for unit in units:
            if not unit.closed:
                unit.closed = True
                if self.syncing and unit.trained:
                    unit.send_gradients()
                unit.drop()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Whole gradients add up on each rank: this trades memory for communication."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @contextmanager
    def quiet(self, model: nn.Module) -> Iterator[None]:
        """Inside, all weights stay gathered."""
        for unit in self.units:
            unit.gather()
            unit.stays_gathered = True
        try:
            with self.no_sync(model):
                yield
        finally:
            for unit in self.units:
                unit.stays_gathered = False
                for parameter in unit.parameters:
                    parameter.grad = None
            self._drop_all()

    def after_backward(self, model: nn.Module) -> None:
        self._close(self.units)
        for unit in self.units:
            unit.land()

    def drop_gathered(self, model: nn.Module) -> None:
        self._drop_all()

    def _drop_all(self) -> None:
        for unit in self.units:
            unit.drop()

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [unit.shard for unit in self.trained]

    def parameter_groups(self, model: nn.Module, workload: Workload) -> GroupedParameters:
        trained = self.trained
        return [
            (group, [unit.shard for unit in trained if self._group_of[unit.parameters[0]] == key])
            for key, (group, _) in enumerate(self.groups)
        ]

    def scaler(self, device_type: str, *, enabled: bool) -> torch.amp.GradScaler:
        """Return a scaler that combines the overflows of all ranks: each rank sees only a part of the gradients."""
        return AgreeingGradScaler(device_type, enabled=enabled)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """The norm of the whole is the root of the sum of the parts' squares."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    def traffic(self, model: nn.Module) -> Traffic:
        """All-gathers and reduce-scatters; the last block stays from forward to backward."""
        again = chain.from_iterable(self.blocks[:-1]) if self.reshard else ()
        sizes = [unit.full.numel() * unit.full.element_size() for unit in (*self.units, *self.trained, *again)]
        return Traffic(bytes=sum(sizes), calls=len(sizes))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        for unit in self.units:
            unit.gather()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self._drop_all()
        return state

    def load_model_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        for unit in self.units:
            unit.gather()
        model.load_state_dict(state)
        for unit in self.units:
            unit.keep_own_part()
        self._drop_all()

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer that steps whole parameters."""
        saved = optimizer.state_dict()
        full: dict[int, dict[str, Any]] = {}
        for number, values in saved["state"].items():
            unit = self.trained[number]
            parts = {key: unit.whole_parts(value) for key, value in values.items()}
            for position, parameter in enumerate(unit.parameters):
                full[self.numbers[parameter]] = {key: part[position] for key, part in parts.items()}
        groups = [
            {**settings, "params": [self.numbers[parameter] for parameter in parameters]}
            for settings, (_, parameters) in zip(saved["param_groups"], self.groups, strict=True)
        ]
        return {"state": full, "param_groups": groups}

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        mine: dict[int, dict[str, Any]] = {}
        for number, unit in enumerate(self.trained):
            full_values = [state["state"].get(self.numbers[parameter]) for parameter in unit.parameters]
            if any(full_values):
                mine[number] = unit.own_parts(full_values)
        trained = self.trained
        groups = [
            {**settings, "params": [n for n, unit in enumerate(trained) if self._group_of[unit.parameters[0]] == key]}
            for key, settings in enumerate(state["param_groups"])
        ]
        optimizer.load_state_dict({"state": mine, "param_groups": groups})
