"""Yields one rank's batches of the training data, epoch by epoch, from any step on; adapts datasets of the user.

Samples are assigned to ranks and steps, loaded, and copied to the GPU ahead of their step.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup, count_cores_per_rank
from hpcjobs.trainers.optimization import TrainingPlan
from hpcjobs.trainers.workloads.base import Batch, BatchDataset, Workload, map_tensors, measure_length


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


Order = EpochOrder | HeldOutOrder
"""One rank's batches, each with the seed for the random draws of its dataset."""


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


Collate = Callable[[list[Any]], Batch]


def collate_samples(samples: list[Any]) -> Batch:
    """Collate samples by torch's `default_collate`. Raises UsageError: `default_collate` cannot collate them."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        kinds = ", ".join(sorted({type(sample).__name__ for sample in samples}))
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"samples of the type {kinds} cannot be made into a batch: {why}",
            hint="`collate` of the workload makes a batch from a list of samples",
        ) from error


class CollatedDataset:
    """A map-style dataset: reads samples by number and collates them into a batch."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or collate_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: Sequence[int]) -> Batch:
        if hasattr(self.dataset, "__getitems__"):  # torch's own protocol for reading several samples at once
            return self.collate(self.dataset.__getitems__(list(indices)))
        return self.collate([self.dataset[index] for index in indices])


class Stream:
    """The samples of an iterable dataset. Every rank makes the same passes, and takes its share of the samples.

    A rank iterates over all samples and keeps every n-th one, unless the dataset has `iterate(start, step)`, which
    yields samples start, start + step, start + 2·step, … of a pass. `set_epoch(number)` is called before each pass.
    """

    def __init__(self, dataset: Iterable[Any], collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or collate_samples
        self.length = measure_length(dataset)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("this stream does not know its length")
        return self.length

    def samples(self, first_pass: int, start: int, step: int) -> Iterator[Any]:
        """Samples start, start + step, … counted from the beginning of pass `first_pass` on; without an end."""
        for number in count(first_pass):
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(number)
            known = self.length
            length = known if known is not None and start >= known else (yield from self._one_pass(start, step))
            start = (start - length) % step if start < length else start - length

    def _one_pass(self, start: int, step: int) -> Generator[Any, None, int]:
        """The samples of one pass, then its length as the generator's value."""
        seen = 0
        if hasattr(self.dataset, "iterate") and self.length is not None:
            for sample in islice(self.dataset.iterate(start, step), -(-(self.length - start) // step)):
                seen += 1
                yield sample
            if seen < -(-(self.length - start) // step):
                raise BadData(f"the training data ended early: its length says {self.length} samples")
            return self.length
        for seen, sample in enumerate(self.dataset, 1):
            if seen > start and (seen - 1 - start) % step == 0:
                yield sample
            if seen == self.length:
                break
        if seen == 0:
            raise BadData("the training data has no samples")
        if self.length is not None and seen < self.length:
            raise BadData(f"the training data ended after {seen} samples, but its length says {self.length}")
        return seen


def adapt_datasets(workload: Workload) -> Workload:
    """The workload with datasets as a loader reads them."""
    train = adapt_training_data(workload.train, workload.collate, workload=workload.name)
    held_out = adapt_held_out(workload.held_out, workload.collate, workload=workload.name)
    return replace(workload, train=train, held_out=held_out)


def adapt_training_data(dataset: Any, collate: Collate | None, *, workload: str) -> BatchDataset | Stream:
    """The dataset as a loader reads it. Raises UsageError: datasets of this kind cannot be read."""
    if hasattr(dataset, "read_batch") or isinstance(dataset, Stream):
        return dataset  # type: ignore[no-any-return]
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        return Stream(dataset, collate)
    return _adapt_map_style(dataset, collate, field="train", workload=workload)


def adapt_held_out(dataset: Any, collate: Collate | None, *, workload: str) -> BatchDataset | None:
    if dataset is None or hasattr(dataset, "read_batch"):
        return dataset  # type: ignore[no-any-return]
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"the workload {workload} has an IterableDataset as held_out, whose samples have no numbers",
            hint="list(islice(dataset, 1000)) of its samples serves, or a dataset with __len__ and __getitem__",
        )
    return _adapt_map_style(dataset, collate, field="held_out", workload=workload)


def _adapt_map_style(dataset: Any, collate: Collate | None, *, field: str, workload: str) -> BatchDataset:
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise UsageError(
            f"{field} of the workload {workload} is a {type(dataset).__name__} without {' and '.join(missing)}",
            hint="a torch Dataset, a torch IterableDataset, or a list of samples",
        )
    return CollatedDataset(dataset, collate)


MOST_WORKERS = 8  # one GPU rarely needs more, and each worker takes memory


def choose_workers(dataset: Any, *, device_type: str, cores: int) -> tuple[int, str]:
    """Return the number of loader processes of a rank with this number of cores, and the reason."""
    if device_type == "cpu":
        return 0, "the CPU trains, and processes that read would take cores from it"
    if hasattr(dataset, "on_device"):
        return 0, "the data is made on the GPU"
    if isinstance(dataset, Stream):
        return min(1, cores - 1), "each process would read the whole stream"
    return min(MOST_WORKERS, cores - 1), f"cores per rank: {cores}"


def resolve_workers(config: Config, dataset: Any, group: RankGroup) -> Config:
    """Return the flags with a number of workers, and log the number if it was chosen here; a collective call."""
    if config.workers is not None:
        return config
    allowed = cast(list[Set[int]], group.gather(os.sched_getaffinity(0)))
    cores = max(1, count_cores_per_rank(group.hosts, allowed))
    workers, why = choose_workers(dataset, device_type=group.device.type, cores=cores)
    group.log(f"loader workers per rank: {workers} ({why})")
    return replace(config, workers=workers)


class TrainingData:
    """Batches for one step of this rank; the last one of an epoch may be smaller."""

    def __init__(self, dataset: BatchDataset | Stream, config: Config, group: RankGroup, *, plan: TrainingPlan) -> None:
        self.dataset, self.config, self.group, self.plan = dataset, config, group, plan
        self._loader: Loader | None = None
        if not isinstance(dataset, Stream):
            self._loader = Loader(dataset, device=group.device, workers=config.workers or 0)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        if self._loader is not None:
            return self._loader.epoch(self._order(epoch, first_step))
        return self._read_stream(epoch, self.plan.first_sample(epoch, first_step))

    def count_left(self, epoch: int, first_step: int) -> int:
        """Samples of this rank in an epoch from `first_step` on, where each rank has as many."""
        return -(-(self.plan.epoch_samples - self.plan.first_sample(epoch, first_step)) // self.group.world_size)

    def _order(self, epoch: int, first_step: int) -> EpochOrder:
        assert not isinstance(self.dataset, Stream)
        group = self.group
        return EpochOrder(
            len(self.dataset),
            group.rank,
            group.world_size,
            self.plan.samples_per_step,
            self.config.seed,
            epoch,
            first_step=first_step,
            first_sample=self.plan.first_sample(epoch, first_step),
            fill=self.plan.fill,
        )

    def _read_stream(self, epoch: int, first_sample: int) -> Iterator[Batch]:
        assert isinstance(self.dataset, Stream)
        group, workers = self.group, self.config.workers or 0
        batches = StreamBatches(
            self.dataset,
            epoch=epoch,
            start=first_sample + group.rank,
            step=group.world_size,
            samples=-(-(self.plan.epoch_samples - first_sample) // group.world_size),
            samples_per_step=self.plan.samples_per_step,
            seed=derive_seed(self.config.seed, "stream", epoch),
        )
        if workers == 0:
            source = preserve_generators(iter(batches))
        else:
            generator = torch.Generator()  # the loader's draws must not move the generator of the model
            pin = group.device.type == "cuda"
            source = iter(
                DataLoader(batches, batch_size=None, num_workers=workers, generator=generator, pin_memory=pin)
            )
        yield from prefetch(source, group.device)


class StreamBatches(IterableDataset[Batch]):
    """One rank's batches of a stream; each of several worker processes yields its share of them, in turn.

    The stream's random draws depend on `seed` alone, so they are the same on all ranks. A resumed run iterates over the
    samples before its step too, so it repeats their draws.
    """

    def __init__(
        self, stream: Stream, *, epoch: int, start: int, step: int, samples: int, samples_per_step: int, seed: int
    ) -> None:
        self.stream, self.epoch, self.start, self.step = stream, epoch, start, step
        self.samples, self.samples_per_step, self.seed = samples, samples_per_step, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed_generators(self.seed)
        mine = islice(self.stream.samples(self.epoch, self.start, self.step), self.samples)
        turn = 0
        while samples := list(islice(mine, self.samples_per_step)):
            if turn % workers == number:
                yield self.stream.collate(samples)
            turn += 1
