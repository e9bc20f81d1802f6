"""What datasets draw at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hpcjobs.trainers.data.loader import EpochOrder, Loader
from hpcjobs.trainers.workloads.base import Batch


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
