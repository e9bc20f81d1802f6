"""Datasets of a user's own behind the one interface of the loader."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from hpcjobs.runtime.exits import BadData, UsageError
from hpcjobs.trainers.workloads.base import Batch, BatchDataset, Workload, measure_length

Collate = Callable[[list[Any]], Batch]


def collate_samples(samples: list[Any]) -> Batch:
    """Collate samples by torch's `default_collate`.

    Raises:
        UsageError: it does not know how.
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
    """A map-style dataset, whose samples are read by number and collated into a batch."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or collate_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def read_batch(self, indices: Sequence[int]) -> Batch:
        if hasattr(self.dataset, "__getitems__"):  # torch's own protocol for reading several samples at once
            return self.collate(self.dataset.__getitems__(list(indices)))
        return self.collate([self.dataset[index] for index in indices])


class Stream:
    """The samples of an iterable dataset. Each pass over it is the same on every rank, which takes its own samples.

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
        UsageError: it is none of the kinds of dataset that can be read.
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
