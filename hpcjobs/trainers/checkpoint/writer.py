"""Saves without stopping: a copy into buffers that are kept, then a thread that writes them.

Training stands still for the copy alone, and for the rest of the write before if saves come too fast.
The time it stands still is measured. Storage that fails does not end the run: what was written before
stays, the failure is said, and later saves try again, ever less often.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcjobs.runtime.exits import StorageFault
from hpcjobs.runtime.streams import print_error
from hpcjobs.trainers.checkpoint import format as checkpoint
from hpcjobs.trainers.checkpoint import sharded as parts
from hpcjobs.trainers.checkpoint.format import CheckpointMeta, WriterGroup

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""After a write that failed no save is tried for so long; the pause doubles with each failure."""
INSISTING_PAUSE_S = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWriter:
    """One writer, or one of several that write together, each its parts; then every method is a collective call.

    `stall_s` has one number per save, `write_s` one per checkpoint on disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        background: bool,
        on_written: Callable[[int], None] = lambda step: None,
        together: WriterGroup | None = None,
        agree: Callable[[bool], bool] = lambda mine: mine,
    ) -> None:
        """`on_written` is called, from the thread that writes, with the step of each checkpoint on disk.

        `agree` returns the first writer's decision on every writer.
        """
        self.folder, self.keep, self.background, self.on_written = folder, keep, background, on_written
        self._together, self._agree = together, agree
        self._first = together is None or together.first
        self._mesh: DeviceMesh | None = None
        self.stall_s: list[float] = []
        self.write_s: list[float] = []
        self.best_loss = checkpoint.recorded_loss(folder / checkpoint.BEST)
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._newest: int | None = None  # step of the newest on disk
        self._unwritten: tuple[CheckpointMeta, Any, str] | None = None  # what was tried since, and why it is not
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0

    def save(self, meta: CheckpointMeta, state: Any, *, last: bool) -> None:
        """Write `state`, now or soon; not at all while the storage is given time to recover, but for the last one."""
        began = time.perf_counter()
        self.wait()  # the buffers are still being written
        if self._agree(last or time.monotonic() >= self._not_before):
            if self.background:
                staged = self._copy_tree(state, "")
                self._synchronise()
                self._writing = self._thread.submit(self._try, meta, staged)
            else:
                self._try(meta, state)
        self.stall_s.append(time.perf_counter() - began)

    def save_blocking(self, meta: CheckpointMeta, state: Any, *, within_s: float) -> None:
        """Have `state` on disk; StorageFault if that does not succeed in time."""
        self.wait()
        if self._newest != meta.step:
            self._unwritten = meta, state, ""
            self.finish(within_s=within_s)

    def finish(self, *, within_s: float) -> None:
        """Have what was saved last on disk; StorageFault if that does not succeed in time."""
        self.wait()
        give_up = time.monotonic() + within_s
        while self._unwritten is not None:
            meta, state, _ = self._unwritten
            self._try(meta, state)
            if self._unwritten is not None and self._agree(time.monotonic() >= give_up):
                raise StorageFault(
                    f"step {meta.step} can't be saved in {self.folder}: {self._unwritten[2]}",
                    hint="free space or quota there; the checkpoints before it are whole, and --resume auto finds them",
                )
            if self._unwritten is not None:
                time.sleep(INSISTING_PAUSE_S)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _try(self, meta: CheckpointMeta, state: Any) -> None:
        began = time.perf_counter()
        try:
            self._write(meta, state)
        except OSError as error:
            if error.errno in FULL and self._first:  # room for the next try: one good checkpoint is enough
                checkpoint.prune(self.folder, keep=1)
            self._note_failure(meta, state, error)
            return
        self.write_s.append(time.perf_counter() - began)
        if self._unwritten is not None and self._unwritten[2] and self._first:
            print(f"checkpoint of step {meta.step} is written: {self.folder} can be written again", flush=True)
        self._newest = meta.step
        self._unwritten, self._pause_s, self._not_before = None, FIRST_PAUSE_S, 0.0

    def _write(self, meta: CheckpointMeta, state: Any) -> None:
        place = checkpoint.write(self.folder, meta, state, self._together)
        if not self._first:
            return
        self.on_written(meta.step)
        loss = meta.loss if meta.loss is not None and math.isfinite(meta.loss) else None  # no loss is less than NaN
        if loss is not None and (self.best_loss is None or loss < self.best_loss):
            self.best_loss = loss
            checkpoint.point(self.folder / checkpoint.BEST, place)
        checkpoint.prune(self.folder, keep=self.keep)

    def _note_failure(self, meta: CheckpointMeta, state: Any, error: OSError) -> None:
        why = error.strerror or str(error)
        before = next(iter(checkpoint.steps(self.folder)), None)
        news = self._unwritten is None or self._unwritten[2] != why or self._unwritten[0].step != meta.step
        if news and self._first:
            last = "none before it" if before is None else f"the last good one is {before.name}"
            print_error(
                f"warning: checkpoint of step {meta.step} not written: {why}; {last}; the run goes on, "
                f"saves are tried again after {self._pause_s:.0f} s"
            )
        self._unwritten = meta, state, why
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _copy_tree(self, value: Any, path: str) -> Any:
        """The same tree with every tensor, or this rank's part of it, copied into this saver's buffer for it."""
        if isinstance(value, DTensor):
            self._mesh = self._mesh or parts.on_cpu(value.device_mesh)
            return parts.like(value, self._copy_to_buffer(value.to_local().detach(), path), self._mesh)
        if isinstance(value, torch.Tensor):
            return self._copy_to_buffer(value.detach(), path)
        if isinstance(value, dict):
            return {key: self._copy_tree(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy_tree(item, f"{path}/{n}") for n, item in enumerate(value))
        return value

    def _copy_to_buffer(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _synchronise(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
