"""Assigns samples to ranks and steps, loads them, and copies batches to the GPU ahead of their step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from hpcjobs.trainers.workloads.base import Batch, BatchDataset, map_tensors


def prefetch(batches: Iterator[Batch], device: torch.device, *, cuda: Any = torch.cuda) -> Iterator[Batch]:
    """The batches on the device, each copied one batch ahead; on a CPU, the same iterator."""
    return batches if device.type == "cpu" else _copy_ahead(batches, SideStream(device, cuda))


class SideStream:
    """Copies on a separate stream from pinned memory; only such copies overlap with kernels."""

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


class Draw(NamedTuple):
    """A batch to read."""

    seed: int
    """Of this batch of this rank."""
    samples: list[int]
    """Their numbers."""
    pass_seed: int
    """Of this pass over the data, the same on all ranks."""


class Order(Protocol):
    """One rank's batches, each with the seed for the random draws of its dataset."""

    def __iter__(self) -> Iterator[Draw]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class EpochOrder:
    """One rank's batches of sample numbers in one epoch, from any step on in O(1) loads.

    As in torch's DistributedSampler, all ranks draw one permutation per (seed, epoch), repeat its first samples up to
    a multiple of the world size, and take every n-th sample. So step s of any world with the same global batch holds
    the same samples. The samples after `first_sample` are dealt out to the ranks of this world, each of them once.
    Without `fill`, some ranks have one sample less, and may have one batch less than `len`.
    """

    count: int
    rank: int
    world_size: int
    samples_per_step: int
    seed: int
    epoch: int
    first_step: int = 0
    first_sample: int | None = None  # of all ranks, at `first_step`; None: all steps before it were full
    fill: bool = True

    def __iter__(self) -> Iterator[Draw]:
        mine = self._mine()
        pass_seed = derive_seed(self.seed, "pass", self.epoch)
        for number in range(-(-len(mine) // self.samples_per_step)):
            step, start = self.first_step + number, number * self.samples_per_step
            seed = derive_seed(self.seed, "train", self.epoch, step, self.rank)
            yield Draw(seed, mine[start : start + self.samples_per_step].tolist(), pass_seed)

    def __len__(self) -> int:
        per_rank = -(-max(0, self.count - self._used) // self.world_size)
        return -(-per_rank // self.samples_per_step)

    @property
    def _used(self) -> int:
        if self.first_sample is not None:
            return self.first_sample
        return self.first_step * self.samples_per_step * self.world_size

    def _mine(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator)
        left = order[self._used :]
        missing = -len(left) % self.world_size
        if self.fill and missing:
            left = torch.cat([left, order.repeat(-(-missing // self.count))[:missing]])
        return left[self.rank :: self.world_size]


@dataclass(frozen=True)
class HeldOutOrder:
    """One rank's part of the held-out samples. All ranks have the same number of batches, since the passes of a
    sharded model are collective; a batch without samples makes a pass that is not counted."""

    count: int
    rank: int
    world_size: int
    batch_size: int
    seed: int
    batches: int | None = None  # at most this number

    def __iter__(self) -> Iterator[Draw]:
        for number in range(len(self)):
            yield Draw(derive_seed(self.seed, "held out", number, self.rank), self.batch(number) or [0], self.seed)

    def __len__(self) -> int:
        per_rank = -(-self.count // self.world_size)
        rounds = -(-per_rank // self.batch_size)
        return rounds if self.batches is None else min(rounds, self.batches)

    def batch(self, number: int) -> list[int]:
        """The samples of a batch that count."""
        mine = range(self.rank, self.count, self.world_size)
        return list(mine[number * self.batch_size : (number + 1) * self.batch_size])


def derive_seed(*parts: object) -> int:
    """A seed of 64 bits that any change of any part changes."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class SeededDataset:
    """Seeds the global generators before each batch: random draws depend on seed, rank, epoch and step alone.

    They do not depend on the number of workers or on interruptions. A dataset with `read_augmented(numbers, seed)` gets
    the seed of the pass: draws from this seed and a sample's number are the same at every world size.
    """

    def __init__(self, dataset: BatchDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, draw: Draw) -> Batch:
        seed_generators(draw.seed)
        if hasattr(self.dataset, "read_augmented"):
            batch: Batch = self.dataset.read_augmented(draw.samples, draw.pass_seed)
            return batch
        return self.dataset.read_batch(draw.samples)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


State = tuple[torch.Tensor, Any, Any]


def read_generators() -> State:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generators(state: State) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def preserve_generators(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a source in this process; the source and the model keep separate random generators."""
    own: State | None = None
    while True:
        models = read_generators()
        if own is not None:
            set_generators(own)
        try:
            batch = next(batches, None)
            own = read_generators()
        finally:
            set_generators(models)
        if batch is None:
            return
        yield batch


class _CurrentOrder:
    """The sampler that a persistent loader keeps, while the order behind it changes."""

    def __init__(self) -> None:
        self.order: Order | None = None

    def __iter__(self) -> Iterator[Draw]:
        return iter(self.order or ())

    def __len__(self) -> int:
        return 0 if self.order is None else len(self.order)


class Loader:
    """Batches on the device. Without workers it reads the dataset itself; worker processes live as long as the run.

    A dataset with `on_device`, such as synthetic data, makes its batches on a GPU, without reads or copies.
    """

    def __init__(self, dataset: BatchDataset, *, device: torch.device, workers: int) -> None:
        self._made_on_device = device.type != "cpu" and hasattr(dataset, "on_device")
        if self._made_on_device:
            dataset, workers = dataset.on_device(device), 0  # type: ignore[attr-defined]
        self._dataset, self._device = SeededDataset(dataset), device
        self._sampler = _CurrentOrder()
        self._fetched: DataLoader[Batch] | None = None
        if workers > 0:
            self._fetched = DataLoader(
                self._dataset,  # type: ignore[arg-type]
                sampler=self._sampler,
                batch_size=None,
                num_workers=workers,
                persistent_workers=True,
                generator=torch.Generator(),  # its draws must not move the generator of the model
                pin_memory=device.type == "cuda",
            )

    def epoch(self, order: Order) -> Iterator[Batch]:
        self._sampler.order = order
        batches = map(self._read, order) if self._fetched is None else iter(self._fetched)
        yield from batches if self._made_on_device else prefetch(batches, self._device)

    def _read(self, draw: Draw) -> Batch:
        """Read in this process, then restore the random generators of the model."""
        before = read_generators()
        try:
            return self._dataset[draw]
        finally:
            set_generators(before)
