"""`make soak`: a run that is killed a hundred times. Minutes, so not among the tests that always run."""

from __future__ import annotations

import os
import random

import pytest

from hpcjobs.runtime import checkpoints

from ..conftest import World, worlds_path
from .test_checkpoints import NOISY

KILLS = int(os.environ.get("KILLS", "100"))
STEPS = 40 * KILLS


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_run_killed_again_and_again_loses_no_checkpoint_and_ends_with_the_losses_of_one_left_alone(
    world: World,
) -> None:
    flags, env = ("ddp", *NOISY, "--steps", str(STEPS)), {"PYTHONPATH": worlds_path()}
    alone = world(2, *flags, env=env, run_dir="alone")
    chance, before = random.Random(0), 0
    for kill in range(KILLS):
        at = before + chance.randint(1, 60)
        killed = world(2, *flags, env=env, run_dir="killed", kill_at_step=min(at, STEPS - 60))
        looked = checkpoints.newest_valid(killed.run_dir / checkpoints.FOLDER)
        newest = next(place for place, damage in looked if damage is None)
        saved = int(newest.name.removeprefix("step-"))
        assert saved >= before, f"kill {kill + 1} at step {at} took the checkpoint of step {before} away"
        before = saved
    ended = world(2, *flags, env=env, run_dir="killed")
    assert ended.codes == [0, 0]
    assert ended.losses() == alone.losses()
    assert ended.summary.evaluation == alone.summary.evaluation
