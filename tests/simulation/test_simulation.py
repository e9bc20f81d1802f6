"""Whole lives of jobs in a simulated cluster, with faults from seeds. `make simulate SEEDS=0-99999` plays more."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import checkers
import life
import pytest
from bodies import Run, Work
from life import Fault, Life, Schedule, Seen, Submission
from simulate import Failure, describe, play, play_range
from slurm import Attempt, Job

from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.site import machine

FIXED = {"jobs": 4500, "cases": 9500, "sweeps": 2000, "queue": 3000, "federation": 1000}
"""Seeds that every run plays, from 0."""
FRESH = {"jobs": 600, "cases": 100, "sweeps": 200, "queue": 100, "federation": 100}
"""Seeds that the runs of one day play, and none before."""
TODAY = int(time.time() // 86_400) * 10_000
PORTION = 100
ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"(?:--lives (?P<lives>\w+) )?--seed (?P<seed>\d+)")
MISTAKEN = {
    "jobs": [18688, 700080053, 730080271, 1200320005, 1200390186, 1200490074, 1300030075, 1500005071],
    "federation": [740040156, 1200420071, 1200560117, 1500000749, 1500005071, 1500005376],
}
"""Seeds that failed by a mistake of a checker or of the simulated Slurm."""


def named_seeds() -> list[tuple[str, int]]:
    """Seeds that the pages name: each showed a defect once."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("reliability.md", "track_record.md"))
    seeds_of_pages = [(name["lives"] or "jobs", int(name["seed"])) for name in NAMED.finditer(text)]
    return sorted({*seeds_of_pages, *((lives, seed) for lives, seeds in MISTAKEN.items() for seed in seeds)})


def portions(counts: dict[str, int]) -> list[tuple[str, int]]:
    return [(lives, first) for lives, count in counts.items() for first in range(0, count, PORTION)]


def play_portion(lives: str, first: int, count: int = PORTION) -> None:
    played, failures, _ = play_range(first, count, lives)
    assert played == count
    assert not failures, "\n\n".join(describe(failure) for failure in failures[:3])


@pytest.mark.parametrize(("lives", "first"), portions(FIXED))
def test_nothing_is_lost_or_doubled_in_any_schedule_of_the_fixed_seeds(lives: str, first: int) -> None:
    play_portion(lives, first)


@pytest.mark.parametrize(("lives", "after"), portions(FRESH))
def test_nothing_is_lost_or_doubled_in_any_schedule_of_todays_seeds(lives: str, after: int) -> None:
    play_portion(lives, TODAY + after)


@pytest.mark.parametrize(("lives", "seed"), named_seeds())
def test_nothing_is_lost_or_doubled_in_a_schedule_in_which_something_was_once(lives: str, seed: int) -> None:
    play_portion(lives, seed, 1)


@pytest.mark.parametrize("seed", [62, 25178])
def test_a_schedule_is_the_same_each_time_that_it_is_played(tmp_path: Path, seed: int) -> None:
    schedule = Schedule(seed, life.draw_faults(seed))
    machine._has_configuration.cache_clear()
    first, second = (play(schedule, tmp_path / "world") for _ in range(2))
    assert first.world.trace == second.world.trace
    assert first.seen == second.seen


@pytest.mark.parametrize("was_requeued", [True, False])
def test_an_ended_job_that_is_put_back_may_be_cancelled_while_it_waits(tmp_path: Path, was_requeued: bool) -> None:
    played = Life(Schedule(0, ()), tmp_path)
    run_dir = str(tmp_path / "run")
    job = Job(1, f"{run_dir}/job.sh", "x", 1.0, "", 1.0, put_backs=[30.0] if was_requeued else [])
    played.slurm.every.append(job)
    for when, state in ((20.0, State.COMPLETED), (40.0, State.CANCELLED)):
        played.seen.append(Seen(when, "ps", run_dir, JobRecord("1", state, "sacct"), is_away=False))
    checkers.check_states(played)
    assert bool(played.errors) != was_requeued


@pytest.mark.parametrize(("state", "put_back_at"), [("LOST", 30.0), ("LOST", 10.0), ("COMPLETED", 30.0)])
def test_a_job_that_was_lost_after_it_was_put_back_may_be_unknown(
    tmp_path: Path, state: str, put_back_at: float
) -> None:
    played = Life(Schedule(0, ()), tmp_path)
    played.settings.accounting = "prompt"
    played.settings.keeps_commands = True
    run_dir = str(tmp_path / "run")
    played.slurm.every.append(Job(1, f"{run_dir}/job.sh", "x", 1.0, "", 1.0, state=state, put_backs=[put_back_at]))
    for when, seen in ((20.0, State.TIMEOUT), (40.0, State.UNKNOWN)):
        played.seen.append(Seen(when, "ps", run_dir, JobRecord("1", seen, "sacct"), is_away=False))
    checkers.check_states(played)
    assert bool(played.errors) != (state == "LOST" and put_back_at > 20.0)


@pytest.mark.parametrize("continues", [1, 3])
def test_of_a_job_whose_continuation_was_cancelled_while_it_waited_that_end_is_shown(
    tmp_path: Path, continues: int
) -> None:
    played = Life(Schedule(0, ()), tmp_path)
    played.settings.accounting = "prompt"
    one = Submission(Work(str(tmp_path / "runs" / "x")), life.plan_for("retries", tmp_path / "runs" / "x"))
    run_dir = one.work.run_dir
    first = Job(1, f"{run_dir}/job.sh", "x", 1.0, "", 1.0, state="FAILED")
    first.attempts.append(Attempt(first, 0, ["n0"], 1.0, 1801.0, code=85))
    waited = Job(2, first.script, "x", 9.0, "", 9.0, state="CANCELLED", dependency=[("afterany", continues)])
    played.submissions.append(one)
    played.works[run_dir] = one.work
    played.slurm.every += [first, waited]
    played.seen.append(Seen(20.0, "ps", run_dir, JobRecord("1", State.CANCELLED, "sacct"), is_away=False))
    checkers.check_states(played)
    assert bool(played.errors) == (continues != 1)


@pytest.mark.parametrize(
    ("ran", "is_right"),
    [((1,), True), ((1, 2), False), ((2,), False), ((), False)],
    ids=["first", "both", "late", "none"],
)
def test_of_two_jobs_of_one_submission_only_the_late_copy_may_leave_as_it_starts(
    tmp_path: Path, ran: tuple[int, ...], is_right: bool
) -> None:
    played = Life(Schedule(0, ()), tmp_path)
    played.world.injected.append(Fault("sbatch", 0, "late20"))
    one = Submission(Work(str(tmp_path / "runs" / "x")), life.plan_for("plain", tmp_path / "runs" / "x"))
    played.works[one.work.run_dir] = one.work
    for number in (1, 2):
        job = Job(
            number, f"{one.work.run_dir}/job.sh", "x", 1.0, "", 1.0, state="COMPLETED", ends=[(99.0, "COMPLETED")]
        )
        job.attempts.append(Attempt(job, 0, ["n0"], 1.0, 1801.0, code=0))
        one.work.runs += [Run(job.attempts[0], 1.0, 0)] if number in ran else []
        played.slurm.every.append(job)
    checkers.check_once(played, one)
    assert bool(played.errors) != is_right


def test_a_failure_names_the_command_that_replays_it() -> None:
    trace = ["       1.0  it began", *(f"{second:10.1f}  no space" for second in range(2, 99))]
    text = describe(Failure(Schedule(3, life.draw_faults(3)), ["lost"], trace))
    assert ".venv/bin/python -W ignore tests/simulation/simulate.py --seed 3 --faults" in text
    assert text.endswith("       1.0  it began\n       2.0  no space  (97 times)")


def test_a_schedule_plays_in_a_folder_of_its_own_and_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    play(Schedule(5, life.draw_faults(5)), tmp_path / "world")
    assert dict(os.environ) == before
    assert os.listdir(tmp_path) == ["world"]
