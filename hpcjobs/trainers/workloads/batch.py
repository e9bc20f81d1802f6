"""Batches of any structure: their length, parts of them, and changes of all their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpcjobs.runtime.exits import BadData
from hpcjobs.trainers.workloads.base import Batch


def count_samples(batch: Batch) -> int:
    """The length of the first dimension, which all tensors of a batch share."""
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.dim() > 0}
    if len(lengths) != 1:
        shapes = [tuple(tensor.shape) for tensor in _tensors(batch)]
        raise BadData(
            f"a batch has tensors of shapes {shapes}, but the first dimension of each must count its samples",
            hint="`collate` of the workload makes a batch from a list of samples",
        )
    return lengths.pop()


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch, in a batch of the same structure; a list without tensors, such as
    `default_collate` makes of strings, has one item per sample too."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, list) and not _tensors(batch):
        return batch[start:stop]
    return map_parts(batch, lambda part: slice_batch(part, start, stop))


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same structure, with each of its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return map_parts(batch, lambda part: map_tensors(part, change))


def map_parts(batch: Batch, change: Callable[[Batch], Any]) -> Any:
    """A batch of the same structure, with each of its direct parts changed."""
    if isinstance(batch, Mapping):
        return {name: change(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    return batch


def move_numbers(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers of samples on the device, from pinned memory: other copies wait for all that a GPU has been given."""
    tensor = torch.as_tensor(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(parts, list | tuple) else []
