"""What datasets draw at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data import EpochOrder, Loader
from hpcjobs.trainers.optimization import plan_training
from hpcjobs.trainers.workloads.base import Batch

from .. import worlds
from ..conftest import World, worlds_path


class Augmented:
    """Every sample is a draw from each of the global generators."""

    def __len__(self) -> int:
        return 24

    def read_batch(self, indices: Sequence[int]) -> Batch:
        return (torch.stack([torch.tensor([torch.rand(()), random.random(), np.random.rand()]) for _ in indices]),)


def draws(*, seed: int = 0, rank: int = 0, epoch: int = 0, first_step: int = 0, workers: int = 0) -> list[object]:
    order = EpochOrder(24, rank, 2, 4, seed, epoch, first_step=first_step)
    loader = Loader(Augmented(), device=torch.device("cpu"), workers=workers)
    return [batch[0].tolist() for batch in loader.epoch(order)]


def test_every_seed_rank_and_epoch_draws_other_numbers() -> None:
    flat = [str(batch) for batch in (*draws(), *draws(seed=1), *draws(rank=1), *draws(epoch=1))]
    assert len(set(flat)) == len(flat) == 12


@pytest.mark.parametrize("workers", [1, 2])
def test_draws_do_not_depend_on_the_number_of_workers_and_go_on_after_an_interruption(workers: int) -> None:
    assert draws(workers=workers) == draws()
    assert draws(workers=workers, first_step=1) == draws()[1:]
    assert draws(workers=workers, seed=1) == draws(seed=1) != draws()


def test_reading_in_the_process_of_the_model_leaves_the_models_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    untouched = torch.rand(3).tolist(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    draws()
    assert (torch.rand(3).tolist(), random.random()) == untouched


@pytest.mark.parametrize(("world", "batch"), [(1, 7), (2, 3), (3, 4), (4, 2)])
@pytest.mark.parametrize("later", [(1, 5), (2, 6), (4, 1)])
def test_a_run_resumed_in_mid_epoch_at_other_world_sizes_takes_each_sample_once(
    world: int, batch: int, later: tuple[int, int]
) -> None:
    """Three worlds, one after the other, in one epoch of 101 samples, none of them repeated to fill up."""
    workload = replace(worlds.points(Config()), train=worlds.Points(101))
    seen: list[int] = []
    samples = 0
    for ranks, per_rank, steps in ((world, batch, 3), (*later, 2), (world, batch, 1000)):
        plan = plan_training(Config(batch_size=per_rank), workload, ranks, fill=False).resume_at(0, samples, done=0)
        first, taken = plan.locate(0)[1], []
        for rank in range(ranks):
            order = EpochOrder(
                101, rank, ranks, per_rank, 0, 0, first_step=first, first_sample=plan.first_sample(0, first), fill=False
            )
            assert first + len(order) == plan.steps_per_epoch
            taken += [number for draw in islice(order, steps) for number in draw.samples]
        seen += taken
        samples = plan.first_sample(0, min(first + steps, plan.steps_per_epoch))
        assert samples == len(seen)
    assert sorted(seen) == list(range(101))


def test_trainers_that_go_on_at_another_world_size_read_each_sample_of_the_epoch_once(
    world: World, tmp_path: Path
) -> None:
    flags = ("--workload", "worlds:listed", "--resume", "auto", "--checkpoint-every", "1")
    env = {"PYTHONPATH": worlds_path(), "LISTED": str(tmp_path / "read.txt")}
    assert world(2, "ddp", *flags, "--batch-size", "5", "--steps", "3", env=env).codes == [0, 0]
    assert world(1, "ddp", *flags, "--batch-size", "7", "--epochs", "1", env=env).codes == [0]
    numbers = [int(number) for number in (tmp_path / "read.txt").read_text().split()]
    assert sorted(numbers) == list(range(64))
