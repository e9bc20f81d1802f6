"""Jobs with retries on one machine: started again where they are, as long as their budgets and their progress allow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.record.state import Attempt
from hpcjobs.run.job_files import read_attempts
from hpcjobs.scheduler.base import State

from .machines import Machine, until

LEAVES = """
import os, sys
from hpcjobs.runtime import signals
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
signals.write_number(signals.STEPS, 10 * (start + 1))
if start < int(sys.argv[1]):
    signals.leave(10 * (start + 1))
"""
LISTENS = """
import os, time
from hpcjobs.runtime import signals
stop, start = signals.listen(), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
open(f"listens{start}.{os.environ['RANK']}", "w").close()
if start == 0:
    while not stop.requested:
        time.sleep(0.01)
    signals.leave(7)
"""
KILLED = """
import os, signal
if "SLURM_RESTART_COUNT" not in os.environ and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def history(machine: Machine, job: str) -> list[Attempt]:
    return read_attempts(machine.plans[job].run_dir)


def test_a_program_that_saved_and_left_is_started_again_until_it_is_done(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", LEAVES, "2", retries="on")
    assert machine.end_of(job).state == State.COMPLETED, machine.log(job)
    assert [(each.cause, each.steps, each.saved, each.decision) for each in history(machine, job)] == [
        ("preempt", 10, 10, "requeued"),
        ("preempt", 20, 20, "requeued"),
        ("completed", 30, 20, "completed"),
    ]


def test_a_program_that_leaves_by_the_code_alone_is_started_again_until_it_makes_no_progress(machine: Machine) -> None:
    job = machine.submit("bash", "-c", "exit 85", retries="on")
    record = machine.end_of(job)
    assert (record.state, record.exit_code) == (State.FAILED, 85), machine.log(job)
    assert [each.cause for each in history(machine, job)] == ["preempt"] * 3
    assert history(machine, job)[-1].decision == "ended: no progress, 0 is still all that is saved"


def test_a_budget_that_is_spent_ends_the_job(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", LEAVES, "5", retries="preempt=1")
    record = machine.end_of(job)
    assert (record.state, record.exit_code) == (State.FAILED, 85)
    assert [each.decision for each in history(machine, job)] == ["requeued", "ended: the budget preempt=1 is spent"]


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpirun"])
def test_ranks_are_told_ahead_of_the_time_limit_and_the_next_start_has_a_new_one(
    machine: Machine, launcher: str
) -> None:
    layout = {"ntasks_per_node": 2, "launcher": launcher, "time": "30s", "signal_before": "20s"}
    job = machine.submit(sys.executable, "-c", LISTENS, retries="on", **layout)
    assert machine.end_of(job).state == State.COMPLETED, machine.log(job)
    assert [each.cause for each in history(machine, job)] == ["timeout", "completed"]
    listened = {path.name for path in machine.here.glob("listens*")}
    assert listened == {"listens0.0", "listens0.1", "listens1.0", "listens1.1"}


def test_a_rank_that_was_killed_costs_one_start(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", KILLED, retries="on", ntasks_per_node=2)
    assert machine.end_of(job).state == State.COMPLETED, machine.log(job)
    assert [(each.cause, each.decision) for each in history(machine, job)] == [
        ("node", "requeued"),
        ("completed", "completed"),
    ]


def test_what_is_cancelled_is_not_started_again(machine: Machine) -> None:
    job = machine.submit(sys.executable, "-c", LISTENS, retries="on")
    until((machine.here / "listens0.0").exists)
    machine.local.cancel([job])
    assert machine.end_of(job).state == State.CANCELLED
    assert history(machine, job) == []
    assert not (machine.here / "listens1.0").exists()


def test_horovodrun_is_refused_since_it_cannot_tell_its_ranks(here: Path) -> None:
    with pytest.raises(RequestError, match="horovodrun cannot tell its ranks to save"):
        hpcjobs.plan(["true"], site="local", launcher="horovodrun", retries="on")
