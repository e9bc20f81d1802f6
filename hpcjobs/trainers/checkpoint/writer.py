"""Checkpoints of trainers, written in the background from copies in buffers that are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.checkpoint_writer import BackgroundWriter
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.torch_state import Buffers, Keys
from hpcjobs.trainers.checkpoint import format as checkpoint
from hpcjobs.trainers.checkpoint import sharded as parts
from hpcjobs.trainers.checkpoint.format import WriterGroup


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
        return checkpoint.write(self.folder, meta, state, self._together, claim=self.claim)


class ShardBuffers(Buffers):
    """Of a tensor that ranks hold in parts, this rank's part is copied."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh: DeviceMesh | None = None

    def copy_tree(self, value: Any, path: Keys) -> Any:
        if isinstance(value, DTensor):
            self._mesh = self._mesh or parts.on_cpu(value.device_mesh)
            local: torch.Tensor = value.to_local()
            return parts.like(value, self.copy_tensor(local.detach(), path), self._mesh)
        return super().copy_tree(value, path)
