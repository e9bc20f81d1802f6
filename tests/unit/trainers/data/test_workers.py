"""How many loader processes a rank gets where `--workers` does not say."""

from __future__ import annotations

import pytest

from hpcjobs.trainers.data import Stream, choose_workers
from hpcjobs.trainers.distributed import count_cores_per_rank
from hpcjobs.trainers.workloads.lm import SyntheticTokens

from ..conftest import World, worlds_path

FILES = [0, 1, 2]
SYNTHETIC = SyntheticTokens(8, length=8, vocabulary=32)


@pytest.mark.parametrize(
    ("dataset", "device", "cores", "workers"),
    [
        (FILES, "cuda", 6, 5),
        (FILES, "cuda", 32, 8),
        (FILES, "cuda", 1, 0),
        (FILES, "cpu", 32, 0),
        (SYNTHETIC, "cuda", 32, 0),
        (Stream(iter(FILES), None), "cuda", 32, 1),
        (Stream(iter(FILES), None), "cuda", 1, 0),
    ],
)
def test_workers_follow_from_the_cores_of_the_rank_the_device_and_the_data(
    dataset: object, device: str, cores: int, workers: int
) -> None:
    assert choose_workers(dataset, device_type=device, cores=cores)[0] == workers


def test_cores_of_a_rank_are_its_own_or_its_share_of_those_that_ranks_of_the_host_have_together() -> None:
    assert count_cores_per_rank(["a", "a"], [{0, 1, 2, 3}] * 2) == 2
    assert count_cores_per_rank(["a", "a"], [{0, 1}, {2, 3, 4}]) == 2
    assert count_cores_per_rank(["a", "b"], [{0, 1, 2, 3}] * 2) == 4


def test_the_choice_is_printed_and_recorded_and_a_given_number_is_taken_as_it_is(world: World) -> None:
    flags, env = ("--workload", "worlds:points", "--device", "cpu", "--steps", "1"), {"PYTHONPATH": worlds_path()}
    chosen = world(1, "ddp", *flags, env=env)
    assert "loader workers per rank: 0 (the CPU trains" in chosen.out[0]
    assert chosen.summary.config["workers"] == 0
    given = world(1, "ddp", *flags, "--workers", "1", env=env, run_dir="given")
    assert "loader workers" not in given.out[0]
    assert given.summary.config["workers"] == 1
