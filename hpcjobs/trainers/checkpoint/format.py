"""The content that trainers put into a checkpoint (`runtime/checkpoints.py` has its folder and manifest).

checkpoints/step-00000120/state.pt        torch.save: model, optimizer, scaler, RNG by rank
checkpoints/step-00000120/parts/          what ranks hold in parts, by torch.distributed.checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hpcjobs import torch_state
from hpcjobs.runtime.checkpoints import MANIFEST, CheckpointClaim, CheckpointMeta, Draft, measure, read_meta
from hpcjobs.runtime.exits import BadCheckpoint
from hpcjobs.trainers.checkpoint import sharded as parts

STATE, PARTS = "state.pt", "parts"


@dataclass(frozen=True)
class WriterGroup:
    """The ranks that write one checkpoint, each its parts; the first of them makes and renames its folder."""

    ranks: dist.ProcessGroup
    owner: int  # process id of the first


def write(
    folder: Path,
    meta: CheckpointMeta,
    state: Any,
    together: WriterGroup | None = None,
    *,
    claim: CheckpointClaim | None = None,
) -> Path:
    """Write one checkpoint beside its place, sync it, and rename it there; a collective call of ranks `together`.

    OSError leaves the checkpoints before it as they were, and takes no room.
    """
    draft = Draft(folder, meta, claim=claim, owner=None if together is None else together.owner)
    tree, in_parts = parts.split_tensors(state)

    def begin() -> None:
        draft.begin()
        torch_state.write(draft.path / STATE, tree)

    def complete(sums: parts.Sums) -> None:
        of_parts = {f"{PARTS}/{name}": sum_ for name, sum_ in sums.items()}
        draft.complete({STATE: measure(draft.path / STATE), **of_parts})

    try:
        if together is None:
            begin()
            complete({})
        else:
            writer = parts.Writer(draft.path / PARTS, measure=measure, begin=begin, complete=complete)
            parts.write(in_parts, writer, together.ranks)
    except BaseException:
        draft.discard()
        raise
    return draft.place


def read(
    place: Path, placed: Callable[[parts.Where], torch.Tensor | None] = lambda where: None
) -> tuple[CheckpointMeta, Any]:
    """A checkpoint's metadata and state, in host memory; only plain values and tensors are unpickled.

    A collective call where the checkpoint was written in parts; these are read into what `placed` has for them.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        state = torch_state.read(place / STATE, any_object=False)
        if (place / PARTS).is_dir():
            state = parts.read(place / PARTS, state, placed)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise BadCheckpoint(f"{place} can't be loaded: {error}") from error
    return read_meta(manifest), state
