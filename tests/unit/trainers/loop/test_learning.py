"""The documented commands learn: accuracies on the 1,000 held-out digits, far above the 0.1 of chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs import trainers
from hpcjobs.record.summary import RunSummary

from ..conftest import World

DIGITS = ("--workload", "mnist", "--no-probe", "--log-every", "50")
SCALED = ("--lr-scaling", "linear", "--epochs", "1")


def accuracy(folder: Path) -> float:
    evaluation = RunSummary.read(folder).evaluation
    assert evaluation is not None
    return evaluation.accuracy


@pytest.mark.parametrize("flags", [("--lr", "0.1", "--epochs", "1"), ("--lr", "0.001", "--batch-size", "256")])
def test_digits_are_learnt_at_rates_from_a_thousandth_to_a_tenth(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert trainers.run("ddp", [*DIGITS, *flags, "--run-dir", str(tmp_path)]) == 0
    assert accuracy(tmp_path) > 0.85


def test_the_global_batch_and_the_scaled_rate_of_eight_ranks_learn_in_one_epoch(world: World) -> None:
    """The numbers of eight ranks (128 samples at 0.016), on two."""
    ended = world(2, "ddp", *DIGITS, *SCALED, "--batch-size", "64", "--lr", "0.008", "--log-every", "1")
    assert ended.codes == [0, 0], ended.err
    assert (ended.summary.global_batch_size, ended.summary.lr) == (128, 0.016)
    assert accuracy(ended.run_dir) > 0.85
    rates = [line["lr"] for line in ended.lines("step")]
    assert rates[:4] == pytest.approx([0.004, 0.008, 0.012, 0.016]), "a tenth of 32 steps to warm up"
    assert set(rates[4:]) == {0.016}


@pytest.mark.long
def test_eight_ranks_with_a_scaled_rate_learn_in_one_epoch(world: World) -> None:
    ended = world(8, "ddp", *DIGITS, *SCALED)
    assert ended.codes == [0] * 8, ended.err
    assert accuracy(ended.run_dir) > 0.85
