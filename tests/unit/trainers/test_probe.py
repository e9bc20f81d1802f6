"""Exposed communication is measured without a trace in the training."""

from __future__ import annotations

import pytest

from .conftest import World
from .test_world import worlds_path

FLAGS = ("--workload", "worlds:noisy_points", "--log-every", "1", "--steps", "40")


@pytest.mark.parametrize("trainer", ["ddp", "ddp_scratch"])
def test_losses_with_the_probe_are_those_without_it(trainer: str, world: World) -> None:
    env = {"PYTHONPATH": worlds_path()}
    probed = world(2, trainer, *FLAGS, "--probe-every", "4", "--accumulate", "2", env=env, run_dir="probed")
    plain = world(2, trainer, *FLAGS, "--no-probe", "--accumulate", "2", env=env, run_dir="plain")
    assert probed.losses() == plain.losses()
    assert len(probed.losses()) == 40
    measured = probed.summary.exposed_communication_s
    assert measured is not None
    assert measured.count == 11
    assert plain.summary.exposed_communication_s is None
