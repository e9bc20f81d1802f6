"""Applies flags to a model's blocks before a strategy spreads the model: the same under each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.strategies.base import blocks_of, choose_blocks
from hpcjobs.trainers.workloads.base import Workload


def change_blocks(model: nn.Module, workload: Workload, config: Config, group: RankGroup) -> Workload:
    """Compile blocks, and have them compute again in the backward pass, where flags say so; the workload, with blocks.

    Only `forward` is replaced: names stay, and the hooks of a strategy that gathers a block's weights run around it.

    Raises:
        UsageError: the model has no blocks.
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
            contexts: dict[str, Any] = {"context_fn": partial(make_contexts, norms)} if norms else {}
            forward = partial(checkpoint, forward, use_reentrant=False, **contexts)
        block.forward = forward
    return replace(workload, blocks=kinds)


def make_contexts(norms: Sequence[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a block's forward pass, and around the one that is computed again."""
    return nullcontext(), keep_statistics(norms)


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
