"""Writes and reads the state of a trainer in a checkpoint (`runtime/checkpoints.py` has its folder and manifest).

checkpoints/step-00000120/state.pt        torch.save: model, optimizer, scaler, RNG by rank
checkpoints/step-00000120/parts/          sharded tensors, by torch.distributed.checkpoint

`CheckpointWriter` writes in the background, from copies in buffers that are used again.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcjobs import torch_state
from hpcjobs.runtime.checkpoints import (
    MANIFEST,
    BackgroundWriter,
    CheckpointClaim,
    CheckpointMeta,
    Draft,
    measure,
    read_meta,
)
from hpcjobs.runtime.exits import BadCheckpoint
from hpcjobs.torch_state import Buffers, Keys
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
    """Write one checkpoint under a temporary name, sync and rename it; a collective call of ranks `together`.

    After an OSError earlier checkpoints are unchanged, and the draft is removed.
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

    A collective call if the checkpoint has sharded tensors; each is read into the tensor from `placed`.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        state = torch_state.read(place / STATE, any_object=False)
        if (place / PARTS).is_dir():
            state = parts.read(place / PARTS, state, placed)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise BadCheckpoint(f"{place} can't be loaded: {error}") from error
    return read_meta(manifest), state


class CheckpointWriter(BackgroundWriter):
    """One writer, or one of several that write together, each its parts; then every method is a collective call."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        background: bool,
        on_written: Callable[[int], None] = lambda step: None,
        together: WriterGroup | None = None,
        first: bool = True,
        agree: Callable[[bool], bool] = lambda mine: mine,
    ) -> None:
        """`first`: whether this rank makes and completes the checkpoints."""
        super().__init__(
            folder,
            keep=keep,
            background=background,
            on_written=on_written,
            first=first,
            owner=None if together is None else together.owner,
            agree=agree,
        )
        self._together, self._buffers = together, ShardBuffers()

    def copy_state(self, state: Any) -> Any:
        return self._buffers.copy(state)

    def write_files(self, meta: CheckpointMeta, state: Any) -> Path:
        return write(self.folder, meta, state, self._together, claim=self.claim)


class ShardBuffers(Buffers):
    """Copies this rank's part of sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh: DeviceMesh | None = None

    def copy_tree(self, value: Any, path: Keys) -> Any:
        if isinstance(value, DTensor):
            self._mesh = self._mesh or parts.on_cpu(value.device_mesh)
            local: torch.Tensor = value.to_local()
            return parts.like(value, self.copy_tensor(local.detach(), path), self._mesh)
        return super().copy_tree(value, path)
