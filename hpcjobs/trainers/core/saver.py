"""Saves without stopping: a copy into buffers that are kept, then a thread that writes them.

Training stands still for the copy alone, and for the rest of the write before if saves come too fast.
The time it stands still is measured.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hpcjobs.trainers.core import checkpoint
from hpcjobs.trainers.core.checkpoint import Moment


class Saver:
    """One writer. `stall_s` has one number per save."""

    def __init__(self, folder: Path, *, keep: int, background: bool) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self.stall_s: list[float] = []
        self.best_loss = checkpoint.recorded_loss(folder / checkpoint.BEST)
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, moment: Moment, state: Any) -> None:
        began = time.perf_counter()
        if self.background:
            self.wait()  # the buffers are still being written
            staged = self._staged(state, "")
            self._synchronise()
            self._writing = self._thread.submit(self._write, moment, staged)
        else:
            self._write(moment, state)
        self.stall_s.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Until the last save is on disk; raises what the writer raised."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _write(self, moment: Moment, state: Any) -> None:
        place = checkpoint.write(self.folder, moment, state)
        if moment.loss is not None and (self.best_loss is None or moment.loss < self.best_loss):
            self.best_loss = moment.loss
            checkpoint.point(self.folder / checkpoint.BEST, place)
        checkpoint.prune(self.folder, keep=self.keep)

    def _staged(self, value: Any, path: str) -> Any:
        """The same tree with every tensor copied into this saver's buffer for it."""
        if isinstance(value, torch.Tensor):
            return self._copied(value.detach(), path)
        if isinstance(value, dict):
            return {key: self._staged(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._staged(item, f"{path}/{n}") for n, item in enumerate(value))
        return value

    def _copied(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _synchronise(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
