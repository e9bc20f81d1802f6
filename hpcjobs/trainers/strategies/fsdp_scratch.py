"""Full sharding from primitives.

Adam keeps 4 values per weight: itself, its gradient and two moments, 16 bytes in fp32. Data parallelism
keeps all of them on every rank; here a rank keeps 1/n of each, and a block's weights are whole only while
it computes. What this costs is communication: with S bytes of weights and n ranks,

    forward     all-gather of each unit           (n-1)/n · S
    backward    all-gather of each block again    (n-1)/n · S    (not with --no-reshard-after-forward)
    backward    reduce-scatter of the gradients   (n-1)/n · S

so 3·(n-1)/n·S per rank and step where data parallelism moves 2·(n-1)/n·S. The next unit's all-gather
travels while this one computes, and so do the gradients of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcjobs.trainers.core.group import Group
from hpcjobs.trainers.fsdp_scratch import FsdpScratchFlags
from hpcjobs.trainers.strategies.base import Strategy, Traffic, blocks_of, room_for
from hpcjobs.trainers.strategies.flat import FlatUnit
from hpcjobs.trainers.workloads.base import Workload


class FsdpScratch(Strategy):
    name = "fsdp_scratch"

    def __init__(self, flags: FsdpScratchFlags) -> None:
        self.reshard = flags.reshard_after_forward
        self.blocks: list[FlatUnit] = []
        self.units: list[FlatUnit] = []  # the blocks in the order they compute, and what is left
        self.numbers: dict[nn.Parameter, int] = {}  # of the whole model, as an unsharded optimizer counts
        self.syncing = True

    def wrap(self, model: nn.Module, *, group: Group, workload: Workload, dtype: torch.dtype | None) -> nn.Module:
        """Equal weights to begin with; a unit per block and one for the rest; hooks that bring and drop."""
        self.quiet_passes = room_for(model, group)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        blocks = [block for _, _, block in blocks_of(model, workload.blocks)]
        inner = {parameter for block in blocks for parameter in block.parameters()}
        rest = [parameter for parameter in model.parameters() if parameter not in inner]
        for block in blocks:
            self.blocks.append(self._unit(list(block.parameters()), group))
        self.units = [*self.blocks, *([self._unit(rest, group)] if rest else [])]
        for position, block in enumerate(blocks):
            self._bring_and_drop(block, position)
        model.register_forward_pre_hook(lambda *_: self._begin_forward())
        self._drop_all()
        return model

    def _unit(self, parameters: list[nn.Parameter], group: Group) -> FlatUnit:
        unit = FlatUnit(parameters, rank=group.rank, world_size=group.world_size)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._completed(unit))  # type: ignore[no-untyped-call]
        return unit

    def _begin_forward(self) -> None:
        """What belongs to no block is needed first and last, so it stays until the backward pass is over."""
        for unit in self.units[len(self.blocks) :]:
            unit.gather()

    def _bring_and_drop(self, block: nn.Module, position: int) -> None:
        unit, last = self.blocks[position], position == len(self.blocks) - 1

        def before_forward(*_: Any) -> None:
            unit.gather()
            if not last:
                self.blocks[position + 1].request()

        def after_forward(*_: Any) -> None:
            if self.reshard and not (last and torch.is_grad_enabled()):  # backward begins with the last
                unit.drop()

        def before_backward(*_: Any) -> None:
            unit.gather()
            if position > 0:
                self.blocks[position - 1].request()

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)
        block.register_full_backward_pre_hook(before_backward)

    def _completed(self, unit: FlatUnit) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            unit.waiting -= 1
            if unit.waiting == 0:
                self._close(unit)

        return hook

    def _close(self, unit: FlatUnit) -> None:
        """All gradients of a unit are there: its weights have done their work."""
        unit.waiting = len(unit.parameters)
        if self.syncing:
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
        """All weights are there before, and stay until the end."""
        for unit in self.units:
            unit.gather()
            unit.kept = True
        try:
            with self.no_sync(model):
                yield
        finally:
            for unit in self.units:
                unit.kept, unit.waiting = False, len(unit.parameters)
                for parameter in unit.parameters:
                    parameter.grad = None
            self._drop_all()

    def after_backward(self, model: nn.Module) -> None:
        for unit in self.units:
            if unit.waiting < len(unit.parameters):  # a parameter of it was not used
                self._close(unit)
        for unit in self.units:
            unit.land()
        self._drop_all()

    def _drop_all(self) -> None:
        for unit in self.units:
            unit.drop()

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [unit.shard for unit in self.units]

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
        sizes = [unit.full.numel() * unit.full.element_size() for unit in self.units]
        again = sizes[: max(0, len(self.blocks) - 1)] if self.reshard else []
        return Traffic(bytes=2 * sum(sizes) + sum(again), calls=2 * len(sizes) + len(again))

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
        """As if the optimizer had stepped whole parameters."""
        saved = optimizer.state_dict()
        whole: dict[int, dict[str, Any]] = {}
        for number, values in saved["state"].items():
            unit = self.units[number]
            parts = {key: unit.whole_parts(value) for key, value in values.items()}
            for position, parameter in enumerate(unit.parameters):
                whole[self.numbers[parameter]] = {key: part[position] for key, part in parts.items()}
        groups = [{**saved["param_groups"][0], "params": sorted(self.numbers.values())}]
        return {"state": whole, "param_groups": groups}

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        mine: dict[int, dict[str, Any]] = {}
        for number, unit in enumerate(self.units):
            whole = [state["state"].get(self.numbers[parameter]) for parameter in unit.parameters]
            if all(whole):
                mine[number] = {key: unit.own_part([values[key] for values in whole]) for key in whole[0]}
        groups = [{**state["param_groups"][0], "params": list(range(len(self.units)))}]
        optimizer.load_state_dict({"state": mine, "param_groups": groups})
