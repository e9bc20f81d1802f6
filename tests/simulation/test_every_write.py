"""Each change of a file fails once, in each way, in lives of jobs and of a sweep that nothing else disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest
from life import Schedule
from simulate import Failure, describe, play
from world import Fault

LIVES = (("jobs", 23), ("jobs", 40), ("jobs", 125), ("sweeps", 296))
"""Between them jobs with and without retries, an array, ps, wait, cancel, requeue, prune, rerun and archive; and a
sweep that is run twice, cancelled and resumed."""
VERBS = ("ps", "wait", "cancel", "requeue", "prune", "rerun", "archive", "submit again", "resume")


@pytest.mark.parametrize(("lives", "seed"), LIVES)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES", "kill"])
def test_no_change_of_a_file_that_fails_loses_or_doubles_anything(
    error: str, lives: str, seed: int, tmp_path: Path
) -> None:
    points = play(Schedule(seed, (), lives), tmp_path / "world").world.points
    failures = []
    for kind, count in (("file", points["file"]), ("write", points.get("write", 0))):
        for number in range(count):
            detail = "torn" if (kind, error) == ("write", "kill") else error
            schedule = Schedule(seed, (Fault(kind, number, detail),), lives)
            done = play(schedule, tmp_path / "world")
            if done.errors:
                failures.append(Failure(schedule, done.errors, done.world.trace))
    assert not failures, "\n\n".join(describe(failure) for failure in failures[:3])
    assert points["file"] > 50


def test_in_these_lives_each_verb_changes_what_it_is_for(tmp_path: Path) -> None:
    played = [play(Schedule(seed, (), lives), tmp_path / "world") for lives, seed in LIVES]
    names = [process.name for one in played for process in one.world.processes]
    assert [verb for verb in VERBS if not any(name.startswith(verb) for name in names)] == []
    jobs = [job for one in played for job in one.slurm.every]
    assert any(job.state == "CANCELLED" for job in jobs)
    assert any(job.put_backs for job in jobs), "requeued"
    _, is_cancelled, later = "\n".join(played[-1].world.trace).partition("  cancelled ['")
    assert is_cancelled
    assert "  submitted ['" in later, "the rest of the sweep, after that"
