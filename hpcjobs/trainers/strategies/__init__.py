"""The interface of strategies, and changes of a model before a strategy wraps it.

The defaults of the interface fit a model that is complete on every rank.

Synchronised BatchNorm works on every device and backend; torch's own SyncBatchNorm needs GPUs. Flags for blocks have
the same effect under each strategy.

Every rank builds the model on torch's meta device: names and shapes, no memory. Once it is sharded, each rank
allocates its parts, and the weights arrive one tensor at a time from rank 0, which alone holds them all, in host
memory. They equal the weights that every rank would build from the same seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hpcjobs.runtime.exits import PeerLost, UnequalData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.workloads.base import GroupedParameters, Workload, group_parameters

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Traffic(NamedTuple):
    """Of one optimizer step and one rank: gradient bytes handed to collectives, and their number."""

    bytes: int
    calls: int | None  # None: differs from step to step


class Strategy:
    """How ranks share a model and its gradients; this one is of a single rank.

    Called on all ranks: once `wrap`, `parameter_groups`, `optimizer` and `scaler`; in each step the passes (all but the
    last inside `no_sync`), `after_backward`, `clip`, the optimizer's step inside `stepping`, and `zero_grad`; then, if
    they are due, an evaluation, `model_state` and `optimizer_state`.
    """

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

        Raises UnequalData: the strategy repeats samples, so no rank should have run out of them first.
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


def synchronize_batch_norms(model: nn.Module, strategy: Strategy) -> None:
    """Replace each BatchNorm of the model; parameters and buffers stay.

    Raises UsageError: a rank may have no batch where others have one, and would keep them waiting.
    """
    if not strategy.fills:
        raise UsageError("--sync-batchnorm and --join: a rank without samples would keep the others waiting")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SynchronizedBatchNorm):
                setattr(parent, name, SynchronizedBatchNorm.of(child))


class SynchronizedBatchNorm(_BatchNorm):
    """BatchNorm with mean and variance over the samples of all ranks while it trains."""

    @classmethod
    def of(cls, other: _BatchNorm) -> SynchronizedBatchNorm:
        """Make one with the tensors of another BatchNorm."""
        made = cls(
            other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats, device="meta"
        )
        made._parameters, made._buffers = other._parameters, other._buffers
        return made.train(other.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected samples and channels, got the shape {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.float()
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = AllReduce.apply(torch.cat([values.sum(others), count]))  # type: ignore[no-untyped-call]
        total = sums[-1].detach()
        mean = (sums[:-1] / total).view(1, -1, *[1] * (values.dim() - 2))
        centred = values - mean
        variance = AllReduce.apply(centred.square().sum(others)) / total  # type: ignore[no-untyped-call]
        self._update_running(mean.detach().flatten(), variance.detach() * total / (total - 1).clamp(min=1))
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight.float()
        result = centred * scale.view_as(mean)
        if self.affine:
            result = result + self.bias.float().view_as(mean)
        normalized: torch.Tensor = result.to(input.dtype)
        return normalized

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class AllReduce(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed


def change_blocks(model: nn.Module, workload: Workload, config: Config, group: RankGroup) -> Workload:
    """Apply --compile-blocks and --activation-checkpointing, and return the workload with its blocks.

    Only `forward` is replaced: names stay, and the hooks of a strategy that gathers a block's weights run around it.

    Raises UsageError: the model has no blocks.
    """
    kinds = choose_blocks(model, workload, group)
    blocks = list(blocks_of(model, kinds))
    if not blocks:
        option = "--activation-checkpointing" if config.activation_checkpointing else "--compile-blocks"
        raise UsageError(f"{option}: the model has no block that repeats", hint="`blocks` of the workload names some")
    for block in blocks:
        forward = torch.compile(block.forward) if config.compile_blocks else block.forward
        if config.activation_checkpointing:
            norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
            contexts: dict[str, Any] = {}
            if norms:  # for the forward pass, and for its recomputation in the backward pass
                contexts["context_fn"] = lambda norms=norms: (nullcontext(), keep_statistics(norms))
            forward = partial(checkpoint, forward, use_reentrant=False, **contexts)
        block.forward = forward
    return replace(workload, blocks=kinds)


@contextmanager
def keep_statistics(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Inside, running statistics are updated on copies: the batch has been counted already."""
    originals = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: None if value is None else value.clone() for name, value in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)


NOT_PLAIN = ("_parameters", "_buffers", "_modules")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and its weights on rank 0."""

    model: nn.Module
    weights: Tensors | None  # by name, in host memory; None on all other ranks


def build_skeleton(build: Callable[[], nn.Module], group: RankGroup) -> Skeleton | str:
    """Return the skeleton of the model, or the reason why it cannot be built; a collective call. `build` sets the seed.

    Raises PeerLost: rank 0, which builds the weights, failed at it.
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
    except Exception as error:  # often it reads values; the complete model is built next, and raises a bug again
        return None, (str(error) or type(error).__name__).splitlines()[0]
    plain = next(list_plain_tensors(model), None)
    if plain is not None:
        return model, f"{plain} is a tensor, but neither a parameter nor a buffer"
    return model, None if is_meta(model) else "it has tensors of its own"


def list_plain_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names of attributes with plain tensors, which torch does not move, shard or save."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in NOT_PLAIN and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                yield f"{prefix}.{name}".lstrip(".")


def is_meta(model: nn.Module) -> bool:
    return all(tensor.is_meta for _, tensor in list_tensors(model))


def list_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by name, also the buffers that no checkpoint has; tied ones once."""
    yield from chain(model.named_parameters(), model.named_buffers())


def materialize(model: nn.Module, weights: Tensors | None, group: RankGroup) -> None:
    """Allocate this rank's part of a sharded skeleton, and fill it from rank 0; a collective call."""
    # by the tensor it replaces: tied weights stay tied
    received: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}
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
