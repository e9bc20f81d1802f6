"""Yields one rank's batches of the training data, epoch by epoch, from any step on; adapts datasets of the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import count, islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.loader import EpochOrder, Loader, derive_seed, prefetch, preserve_generators, seed_generators
from hpcjobs.trainers.distributed.process_group import RankGroup, count_cores_per_rank
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.workloads.base import Batch, BatchDataset, Workload, measure_length

Collate = Callable[[list[Any]], Batch]


def collate_samples(samples: list[Any]) -> Batch:
    """Collate samples by torch's `default_collate`.

    Raises:
        UsageError: `default_collate` cannot collate them.
    """
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
    """The dataset as a loader reads it.

    Raises:
        UsageError: datasets of this kind cannot be read.
    """
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

    def __init__(
        self,
        dataset: BatchDataset | Stream,
        config: Config,
        group: RankGroup,
        *,
        plan: TrainingPlan,
    ) -> None:
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
