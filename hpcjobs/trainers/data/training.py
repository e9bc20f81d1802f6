"""One rank's batches of the training data, epoch by epoch, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.datasets import Stream
from hpcjobs.trainers.data.loader import EpochOrder, Loader, derive_seed, preserve_generators, seed_generators
from hpcjobs.trainers.data.prefetch import prefetch
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.workloads.base import Batch, BatchDataset


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

    What the stream draws at random depends on `seed` alone: it is the same on all ranks, and a resumed run, which
    passes over the samples before its step, draws it again.
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
