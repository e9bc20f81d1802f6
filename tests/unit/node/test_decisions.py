"""Why an attempt ended and whether another follows: every cause, budget and border case, without bash or Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.node.decide import CANCELLED, NODE, PREEMPT, REQUEUED, TIMEOUT, AttemptEnd, decide, find_cause
from hpcjobs.node.schedulers import Clock, Limit, signal_time_s
from hpcjobs.node.step import ENDED_GRACE_S, FAILED_GRACE_S, MISSING_GRACE_S, StepWatch
from hpcjobs.record.state import Attempt, History, append_attempt, count_unrecorded, read_history, replace_last

BUDGETS = {"timeout": 10**9, "preempt": 10**9, "node": 3, "error": 0}


def attempt(cause: str = "preempt", saved: int = 10, job_id: str = "7", decision: str = "requeued") -> Attempt:
    return Attempt(job_id, 100, 200, "n[1-2]", 0, cause, saved, saved, decision)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (AttemptEnd(0, completed=True), "completed"),
        (AttemptEnd(0, completed=True, terminated=True, scheduler_cause=CANCELLED), "completed"),
        # saved, and asks to be started again
        (AttemptEnd(0, asks_to_continue=True), "preempt"),
        (AttemptEnd(0, asks_to_continue=True, completed=True), "preempt"),
        (AttemptEnd(0, asks_to_continue=True, signalled=TIMEOUT), "timeout"),
        (AttemptEnd(0, asks_to_continue=True, signalled=PREEMPT), "preempt"),
        (AttemptEnd(0, asks_to_continue=True, past_limit=True), "timeout"),
        (AttemptEnd(85), "preempt"),  # signalled before its step began, or without the file
        (AttemptEnd(85, signalled=TIMEOUT), "timeout"),
        # the same while Slurm takes the job away
        (AttemptEnd(0, asks_to_continue=True, terminated=True, scheduler_cause=TIMEOUT), "timeout"),
        (AttemptEnd(0, asks_to_continue=True, terminated=True, scheduler_cause=PREEMPT), "preempt"),
        (AttemptEnd(0, asks_to_continue=True, terminated=True, scheduler_cause=NODE), "node"),
        (AttemptEnd(0, asks_to_continue=True, terminated=True, scheduler_cause=CANCELLED), None),
        (AttemptEnd(0, asks_to_continue=True, terminated=True, scheduler_cause=REQUEUED), None),
        (AttemptEnd(0, asks_to_continue=True, terminated=True), None),
        (AttemptEnd(0, asks_to_continue=True, signalled=TIMEOUT, terminated=True, scheduler_cause=CANCELLED), None),
        # nothing saved
        (AttemptEnd(0), None),  # Slurm's end of a step gives 0 too
        (AttemptEnd(0, past_limit=True), "timeout"),
        (AttemptEnd(143, terminated=True), None),
        (AttemptEnd(143, terminated=True, past_limit=True), "timeout"),
        (AttemptEnd(143, terminated=True, scheduler_cause=TIMEOUT), "timeout"),
        (AttemptEnd(143, terminated=True, scheduler_cause=PREEMPT), "preempt"),
        (AttemptEnd(143, terminated=True, scheduler_cause=CANCELLED), None),
        (AttemptEnd(1, terminated=True), None),
        # exit codes
        *((AttemptEnd(code), "node") for code in (11, 18, 19, 22, 134, 137)),
        *((AttemptEnd(code), "preempt") for code in (138, 143)),
        *((AttemptEnd(code, signalled=TIMEOUT), "timeout") for code in (138, 143)),  # a program without a handler
        (AttemptEnd(143, past_limit=True), "timeout"),
        (AttemptEnd(138, signalled=PREEMPT), "preempt"),
        *((AttemptEnd(code), "error") for code in (1, 2, 10, 12, 17, 20, 139)),
        (AttemptEnd(1, past_limit=True), "error"),
        (AttemptEnd(1, gpu_fault=True), "node"),
        (AttemptEnd(23), "error"),
        (AttemptEnd(23, gpu_fault=True), "error"),
        (AttemptEnd(0, completed=True, gpu_fault=True), "completed"),
    ],
)
def test_the_cause_of_every_end(end: AttemptEnd, cause: str | None) -> None:
    assert find_cause(end) == cause


def decided(cause: str, saved: int, *earlier: Attempt, unrecorded: int = 0) -> str:
    return decide(cause, saved=saved, history=History(list(earlier)), budgets=BUDGETS, unrecorded=unrecorded)


def test_a_budget_counts_its_own_cause_alone() -> None:
    past = [attempt("node", saved) for saved in (1, 2, 3)]
    assert decided("node", 4, *past[:2]) == "requeued"
    assert decided("node", 4, *past) == "ended: the budget node=3 is spent"
    assert decided("preempt", 4, *past) == "requeued"
    assert decided("error", 4) == "ended: the budget error=0 is spent"
    assert decided("completed", 0, *past) == "completed"


def test_a_configuration_that_cannot_work_is_not_tried_again() -> None:
    budgets = {**BUDGETS, "error": 3}
    decision = decide("error", saved=4, history=History([]), budgets=budgets, exit_code=23)
    assert decision == "ended: code 23, the configuration cannot work, and another attempt would meet the same"
    assert decide("error", saved=4, history=History([]), budgets=budgets, exit_code=1) == "requeued"


def test_attempts_that_the_history_lacks_count_for_every_budget() -> None:
    assert decided("node", 4, attempt("node", 1), unrecorded=1) == "requeued"
    assert decided("node", 4, attempt("node", 1), unrecorded=2) == "ended: the budget node=3 is spent"
    assert decided("timeout", 4, unrecorded=5) == "requeued"
    assert count_unrecorded(History([attempt(), attempt(job_id="6")]), "7", 3) == 2
    assert count_unrecorded(History([attempt()], unreadable=2), "7", 1) == 2
    assert count_unrecorded(History([attempt(), attempt()]), "7", 1) == 0


def test_what_saves_nothing_more_is_ended_at_its_limit_at_once_and_else_the_third_time() -> None:
    assert decided("timeout", 0) == "ended: no progress, 0 is still all that is saved"
    assert decided("timeout", 1) == "requeued"
    assert decided("timeout", 10, attempt(saved=10)) == "ended: no progress, 10 is still all that is saved"
    assert decided("preempt", 10, *[attempt(saved=10)] * 2) == "requeued"
    assert decided("preempt", 10, *[attempt(saved=10)] * 3).startswith("ended: no progress")
    assert decided("preempt", 0, *[attempt(saved=0)] * 2).startswith("ended: no progress")


def test_going_back_to_an_older_checkpoint_again_and_again_is_no_progress() -> None:
    past = [attempt(saved=saved) for saved in (5, 3, 5)]
    assert decided("preempt", 3, *past).startswith("ended: no progress")


def test_the_history_survives_lines_that_were_cut_short(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    assert read_history(run_dir) == History([])
    append_attempt(run_dir, attempt(saved=1))
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"job_id":"7","star')
    append_attempt(run_dir, attempt(saved=2))
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write("[1]\n\0\0\0\n")
    assert read_history(run_dir) == History([attempt(saved=1), attempt(saved=2)], unreadable=2)


def test_only_the_last_line_of_the_history_is_corrected(tmp_path: Path) -> None:
    for saved in (1, 2):
        append_attempt(str(tmp_path), attempt(saved=saved))
    replace_last(str(tmp_path), attempt(saved=2, decision="resubmitted as 9"))
    assert [each.decision for each in read_history(str(tmp_path)).attempts] == ["requeued", "resubmitted as 9"]


def test_a_history_that_cannot_be_read_is_an_error_and_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        read_history(str(tmp_path))


class Now:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def test_the_clock_counts_down_and_takes_every_new_answer() -> None:
    now = Now()
    clock = Clock(now, None)
    assert clock.left_s == float("inf")
    clock.update(Limit(left_s=600, total_s=3600))
    now.s += 100
    assert clock.left_s == 500
    clock.update(None)
    assert clock.left_s == 500
    clock.update(Limit(left_s=60, total_s=700))
    assert (clock.left_s, clock.total_s) == (60, 700)


def test_the_signal_comes_as_the_user_wants_else_as_measured_else_a_quarter_of_the_limit() -> None:
    assert signal_time_s(fixed_s=0, measured_s=90, total_s=3600, warning_s=300) == 0
    assert signal_time_s(fixed_s=120, measured_s=90, total_s=3600, warning_s=300) == 120
    assert signal_time_s(fixed_s=None, measured_s=90, total_s=3600, warning_s=300) == 90
    assert signal_time_s(fixed_s=None, measured_s=0, total_s=3600, warning_s=300) == 300
    assert signal_time_s(fixed_s=None, measured_s=0, total_s=60, warning_s=300) == 15


class Watched:
    """A step of two tasks whose ends and processes a test sets."""

    def __init__(self, tasks: int = 2, *, agents: bool = False, may_shrink: bool = False) -> None:
        self.now, self.alive = Now(), True
        self.watch = StepWatch(tasks, self.now, agents=agents, may_shrink=may_shrink)

    def after(self, seconds: float, ends: dict[int, int]) -> str | None:
        self.watch.problem(ends, lambda: self.alive)
        self.now.s += seconds
        return self.watch.problem(ends, lambda: self.alive)


def test_a_step_whose_tasks_have_all_ended_is_over_after_a_grace() -> None:
    assert Watched().after(ENDED_GRACE_S - 1, {0: 0, 1: 0}) is None
    assert Watched().after(ENDED_GRACE_S, {0: 0, 1: 0}) == "all tasks have ended"
    assert Watched().after(1e6, {1: 0}) is None  # rank 0 may still have much to do


def test_a_step_that_a_failed_task_does_not_end_is_over_after_a_longer_grace() -> None:
    assert Watched().after(FAILED_GRACE_S - 1, {1: 18}) is None
    assert "did not follow" in (Watched().after(FAILED_GRACE_S, {1: 18}) or "")
    assert Watched(may_shrink=True).after(1e6, {1: 18}) is None


def test_a_step_is_over_when_no_process_of_it_is_left_here_unless_an_agent_may_start_them_again() -> None:
    step = Watched()
    step.after(1, {})
    step.alive = False
    assert step.after(MISSING_GRACE_S - 1, {}) is None
    assert step.after(1, {}) == "no process of a task is left on this host"
    agents = Watched(agents=True)
    agents.after(1, {})
    agents.alive = False
    assert agents.after(1e6, {}) is None
    never_began = Watched()
    never_began.alive = False
    assert never_began.after(1e6, {}) is None


def test_the_ends_of_several_steps_say_nothing_about_the_job() -> None:
    assert Watched(tasks=0).after(1e6, {0: 0}) is None
