"""Exposed communication is measured without a trace in the training."""

from __future__ import annotations

from .conftest import Runs

FLAGS = ("--workload", "worlds:noisy_points", "--log-every", "1", "--steps", "40", "--accumulate", "2")


def test_losses_with_the_probe_are_those_without_it(two_ranks: Runs) -> None:
    for trainer in ("ddp", "ddp_scratch"):
        probed, plain = f"{trainer} probed", f"{trainer} plain"
        two_ranks.run((probed, trainer, (*FLAGS, "--probe-every", "4")), (plain, trainer, (*FLAGS, "--no-probe")))
        assert two_ranks[probed].losses() == two_ranks[plain].losses()
        assert len(two_ranks[probed].losses()) == 40
        measured = two_ranks[probed].summary.exposed_communication_s
        assert measured is not None
        assert measured.count == 11
        assert two_ranks[plain].summary.exposed_communication_s is None
