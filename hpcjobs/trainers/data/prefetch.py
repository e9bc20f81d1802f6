"""Copies of batches to a GPU, beside the computation: the next batch travels while the current one trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcjobs.trainers.workloads.base import Batch
from hpcjobs.trainers.workloads.batch import map_tensors


def prefetch(batches: Iterator[Batch], device: torch.device, *, cuda: Any = torch.cuda) -> Iterator[Batch]:
    """The batches on the device, each copied one batch ahead; on a CPU, the same iterator."""
    return batches if device.type == "cpu" else _copy_ahead(batches, SideStream(device, cuda))


class SideStream:
    """Copies on a stream of their own from pinned memory, from which alone a copy runs beside kernels."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)

    def start(self, batch: Batch) -> Batch:
        """Start the copy of a batch; its tensors must not be read before `await_copy`."""
        with self._cuda.stream(self._stream):
            return map_tensors(batch, self._copy)

    def await_copy(self, batch: Batch) -> Batch:
        """The batch, for the current stream, which waits for the copy; this process does not."""
        current = self._cuda.current_stream(self._device)
        current.wait_stream(self._stream)

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                tensor.record_stream(current)  # its memory belongs to the side stream, which must not reuse it too soon
            return tensor

        return map_tensors(batch, hold)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _copy_ahead(batches: Iterator[Batch], stream: SideStream) -> Iterator[Batch]:
    """The next copy starts before the current batch is handed out, so the whole step covers it."""
    end = object()
    batch = next(batches, end)
    ahead = end if batch is end else stream.start(batch)
    while ahead is not end:
        ready = stream.await_copy(ahead)
        batch = next(batches, end)
        ahead = end if batch is end else stream.start(batch)
        yield ready
