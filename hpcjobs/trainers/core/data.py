"""Which rank trains on which sample when, and the loader that brings them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from hpcjobs.trainers.workloads.base import Batch, Dataset


@dataclass(frozen=True)
class EpochOrder:
    """One rank's batches of sample numbers in one epoch, from any step on in O(1) loads.

    As torch's DistributedSampler: one permutation per (seed, epoch) on all ranks, filled up from its
    own start to a multiple of the world size, dealt out like cards. So step s of any world with the
    same global batch holds the same samples. Not filled up, some ranks have a sample less, and so
    perhaps a batch less than `len` says.
    """

    count: int
    rank: int
    world_size: int
    samples_per_step: int
    seed: int
    epoch: int
    first_step: int = 0
    fill: bool = True

    def __iter__(self) -> Iterator[list[int]]:
        mine = self._mine()
        for start in range(self.first_step * self.samples_per_step, len(mine), self.samples_per_step):
            yield mine[start : start + self.samples_per_step].tolist()

    def __len__(self) -> int:
        per_rank = -(-self.count // self.world_size)
        return -(-per_rank // self.samples_per_step) - self.first_step

    def _mine(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator)
        total = -(-self.count // self.world_size) * self.world_size
        if self.fill and total > self.count:
            order = order.repeat(-(-total // self.count))[:total]
        return order[self.rank :: self.world_size]


class _Switched:
    """The sampler that a persistent loader keeps, while the epoch behind it changes."""

    def __init__(self) -> None:
        self.order: EpochOrder | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.order or ())

    def __len__(self) -> int:
        return 0 if self.order is None else len(self.order)


class Loader:
    """Batches on the device. Without workers it asks the dataset directly; with, they live all run long."""

    def __init__(self, dataset: Dataset, *, device: torch.device, workers: int) -> None:
        self._dataset, self._device = dataset, device
        self._sampler = _Switched()
        self._fetched: DataLoader[Batch] | None = None
        if workers > 0:
            self._fetched = DataLoader(
                dataset,  # type: ignore[arg-type]
                sampler=self._sampler,
                batch_size=None,
                num_workers=workers,
                persistent_workers=True,
                generator=torch.Generator(),  # its draws must not move the generator of the model
                pin_memory=device.type == "cuda",
            )

    def epoch(self, order: EpochOrder) -> Iterator[Batch]:
        self._sampler.order = order
        batches = (self._dataset[indices] for indices in order) if self._fetched is None else self._fetched
        for batch in batches:
            yield self._placed(batch)

    def _placed(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return tuple(part.to(self._device, non_blocking=True) for part in batch)
