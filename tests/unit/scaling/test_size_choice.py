"""Sizes chosen by measurement, with laws, queues and clocks that are simulated."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.job.plan import resolve_request
from hpcjobs.run.index import Entry
from hpcjobs.scaling.auto_size import Goal, TrialBudget, find_size, parse_finish
from hpcjobs.scaling.earlier_runs import EarlierRun, class_of
from hpcjobs.scaling.size_choice import (
    SizeAnswer,
    SizeChoice,
    Value,
    choose_by_efficiency,
    describe_answer,
    measure_sizes,
)
from hpcjobs.scheduler.base import State, discard

Law = Callable[[Job], float]
SITE = "{partitions: {main: {nodes: 16, node: {cpus: 8, mem: 8G}}}, launchers: [srun, mpirun], node_local: []}\n"
HOUR = 3600.0


def perfect(job: Job) -> float:
    return job.nodes


def amdahl(job: Job) -> float:
    return 1 / (0.2 + 0.8 / job.nodes)


def slower_at_3(job: Job) -> float:
    return job.nodes if job.nodes < 3 else 1.2


class Cluster:
    """A simulated cluster of 16 nodes: a law, 1 % of scatter, and a queue in which long jobs wait."""

    def __init__(
        self, law: Law, *, seed: int = 1, work_s: float = 10 * HOUR, time: str = "10h",
        queue: Callable[[int], float | None] = lambda n: 0.0,
    ) -> None:  # fmt: skip
        Path("simulated.yaml").write_text(SITE)
        self.law, self.work_s, self.queue, self.time = law, work_s, queue, time
        self.random = random.Random(seed)
        self.clock = 1e9
        self.done: list[EarlierRun] = []
        self.state = State.COMPLETED
        self.limits: list[int] = []

    def job(self, options: Mapping[str, Value]) -> Job:
        return resolve_request(("true",), "simulated.yaml", time=self.time, **options)

    def launchers(self) -> Sequence[str]:
        return "srun", "mpirun"

    def runs(self, like: Job, axis: str) -> list[EarlierRun]:
        return [run for run in self.done if class_of(run.job, without=axis) == class_of(like, without=axis)]

    def wait(self, entries: Iterable[Entry]) -> None:
        raise AssertionError("every simulated trial has ended")

    def measure(self, options: Mapping[str, Value], *, count: int, limit_s: int) -> None:
        job = self.job(options)
        self.limits.append(limit_s)
        for _ in range(count):
            self.run(job, limit_s=limit_s, name="p-trial")
        self.clock += limit_s

    def run(self, job: Job, *, limit_s: float = math.inf, name: str = "p") -> None:
        """One run, to its end or its time limit."""
        speed = self.law(job) * math.exp(self.random.gauss(0, 0.01))
        complete_s = self.work_s / speed
        state = self.state if not speed or complete_s <= limit_s else State.TIMEOUT
        number = str(len(self.done) + 1)
        entry = Entry(number, name, job.site, "slurm", f"/runs/{number}", self.clock)
        figure = speed if self.state is State.COMPLETED else None
        self.done.append(
            EarlierRun(entry, number, job, Path("/runs") / number, state, min(complete_s, limit_s), figure, "it/s",
                       complete_s)
        )  # fmt: skip

    def wait_s(self, job: Job) -> float | None:
        return self.queue(job.nodes)

    def now(self) -> float:
        return self.clock


def find(cluster: Cluster, *axes: str, tries: bool = True, **goal: object) -> SizeAnswer:
    return find_size(Goal(axes or ("nodes",), **goal), cluster, report=discard, tries=tries)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def folder(here: Path) -> None:
    """Each test has its own."""


@pytest.mark.parametrize(("law", "right"), [(perfect, 16), (amdahl, 2), (slower_at_3, 2)])
@pytest.mark.parametrize("seed", range(10))
def test_the_right_size_is_found_within_the_budget(law: Law, right: int, seed: int) -> None:
    cluster = Cluster(law, seed=seed)
    answer = find(cluster)
    assert answer.options == {"nodes": str(right)}
    assert answer.cost_node_s <= 0.05 * 10 * HOUR * right
    assert set(cluster.limits) == {60}
    assert answer.cost_node_s == pytest.approx(sum(run.node_s for run in cluster.done))


class Measured(NamedTuple):
    throughput: float
    duration_s: float | None = None


@pytest.mark.parametrize(("scatter", "least_right"), [(0.01, 1.0), (0.02, 0.98), (0.03, 0.85), (0.05, 0.4)])
def test_runs_that_scatter_more_make_the_answer_smaller_and_never_larger(scatter: float, least_right: float) -> None:
    """83 % efficient at 2, 71 % at 3: 200 searches each."""
    answers: list[int | None] = []
    for seed in range(200):
        source, runs = random.Random(seed), dict[int, list[Measured]]()
        while True:
            step = choose_by_efficiency(measure_sizes(runs), smallest=1, largest=16, target=0.8, per="nodes")
            if isinstance(step, SizeChoice):
                break
            speed = 1 / (0.2 + 0.8 / step.n)
            new = [Measured(speed * math.exp(source.gauss(0, scatter))) for _ in range(step.runs)]
            runs.setdefault(step.n, []).extend(new)
        answers.append(step.n)
    assert set(answers) <= {1, 2}
    assert answers.count(2) >= 200 * least_right


def test_a_budget_that_is_used_up_ends_the_growth_and_the_answer_says_so() -> None:
    answer = find(Cluster(perfect), budget=TrialBudget.parse("0.2"))  # 12 node-minutes: sizes 1 and 2
    assert answer.options == {"nodes": "2"}
    assert answer.cost_node_s <= 0.2 * HOUR
    assert "the budget, 0.2 node-hours, is 12m00s of one node: 3 trials of 4 nodes would be 13m12s" in answer.reasons[0]
    assert "efficient at 2 nodes (at least" in answer.reasons[0]


def test_a_budget_that_pays_no_trial_is_refused() -> None:
    with pytest.raises(RequestError, match=r"5% of the run, is 30s of one node: 3 trials of 1 node would be 3m00s"):
        find(Cluster(perfect, time="10m"))
    with pytest.raises(RequestError, match="how long the run takes is not known") as refusal:
        find(Cluster(perfect, time="UNLIMITED"))
    assert "--budget in node-hours" in str(refusal.value.hint)


@pytest.mark.parametrize("text", ["0", "5 %%", "120%", "much", "-1"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no budget"):
        TrialBudget.parse(text)


def test_trials_run_longer_where_the_budget_allows_it() -> None:
    cluster = Cluster(amdahl, time="2-00:00:00", work_s=48 * HOUR)
    find(cluster)
    assert set(cluster.limits) == {540}


@pytest.mark.parametrize(
    ("queue", "size"),
    [
        (lambda n: 0.0, 3),  # free: 10 hours of work on three nodes end within four
        (lambda n: None, 3),  # no estimate
        (lambda n: 1.0 * HOUR, 4),  # busy: an hour in the queue leaves three
        (lambda n: 2.5 * HOUR, 7),
    ],
)
def test_the_cheapest_size_that_ends_in_time_counts_the_wait_in_the_queue(
    queue: Callable[[int], float | None], size: int
) -> None:
    cluster = Cluster(perfect, queue=queue)
    answer = find(cluster, finish_by=cluster.clock + 4.1 * HOUR)
    assert answer.options == {"nodes": str(size)}


def test_a_size_whose_queue_is_too_long_is_not_chosen_even_if_it_is_faster() -> None:
    cluster = Cluster(perfect, queue=lambda n: 0.0 if n < 4 else 9 * HOUR)
    with pytest.raises(RequestError, match=r"no size ends in time: 3 nodes|no size ends in time: 2 nodes"):
        find(cluster, finish_by=cluster.clock + 3 * HOUR)


def test_a_queue_that_starts_nothing_in_time_is_the_reason_and_no_larger_size_is_tried() -> None:
    cluster = Cluster(perfect, queue=lambda n: 5 * HOUR)
    with pytest.raises(RequestError, match=r"the queue starts 1 node 1h0\dm after that time"):
        find(cluster, finish_by=cluster.clock + 4 * HOUR)
    assert {run.job.nodes for run in cluster.done} == {1}


def test_a_dry_run_says_that_it_does_not_know_the_wait() -> None:
    cluster = Cluster(perfect, queue=lambda n: 5 * HOUR)
    for _ in range(3):
        cluster.run(cluster.job({"nodes": 1}))
    answer = find(cluster, finish_by=cluster.clock + 20 * HOUR, tries=False)
    assert answer.reasons[0].endswith("; the wait in the queue is not counted by a dry run")


def test_a_launcher_whose_trials_give_no_figure_is_left_out() -> None:
    cluster = Cluster(perfect)
    run = cluster.run
    cluster.run = lambda job, **more: (  # type: ignore[method-assign]
        run(job, **more), job.launcher == cluster.launchers()[1] and _forget_figure(cluster))[0]  # fmt: skip
    answer = find(cluster, "launcher")
    assert answer.options == {"launcher": "srun"}
    assert answer.reasons[0].startswith("trials of launcher mpirun gave no figure")


def test_a_size_in_time_is_taken_where_the_budget_does_not_pay_for_a_cheaper_one() -> None:
    cluster = Cluster(perfect)
    answer = find(cluster, finish_by=cluster.clock + 4.1 * HOUR, budget=TrialBudget.parse("0.4"))
    assert answer.options == {"nodes": "4"}
    assert "the budget, 0.4 node-hours, is 24m00s" in answer.reasons[0]
    cluster = Cluster(perfect)
    with pytest.raises(RequestError, match="the budget"):
        find(cluster, finish_by=cluster.clock + 4.1 * HOUR, budget=TrialBudget.parse("0.2"))


def test_no_size_ends_in_time_where_more_nodes_are_not_faster() -> None:
    cluster = Cluster(slower_at_3)
    with pytest.raises(RequestError, match="more nodes are not faster"):
        find(cluster, finish_by=cluster.clock + 2 * HOUR)


def test_earlier_runs_answer_without_a_trial() -> None:
    cluster = Cluster(amdahl)
    for nodes in (1, 2, 3):
        for _ in range(3):
            cluster.run(cluster.job({"nodes": nodes}))
    answer = find(cluster)
    assert (answer.options, answer.trials, len(answer.earlier_runs), cluster.limits) == ({"nodes": "2"}, [], 9, [])


def test_only_the_runs_that_are_missing_are_tried() -> None:
    cluster = Cluster(amdahl)
    for nodes in (1, 1, 2, 2, 3, 3, 3):
        cluster.run(cluster.job({"nodes": nodes}))
    answer = find(cluster)
    assert answer.options == {"nodes": "2"}
    assert {run.job.nodes for run in cluster.done if run.is_trial} <= {1, 2}
    assert 1 <= len(answer.trials) <= 6


def test_a_dry_search_says_what_would_be_tried_and_tries_nothing() -> None:
    cluster = Cluster(amdahl)
    answer = find(cluster, tries=False)
    assert (answer.next_trial, cluster.done) == ("3 trials of 1 node, 1m00s at most each", [])
    assert describe_answer(answer) == [
        "would try next: 3 trials of 1 node, 1m00s at most each; then what these show to be missing, within the budget"
    ]


def test_a_program_without_a_figure_is_refused_with_what_to_add() -> None:
    cluster = Cluster(lambda job: 0.5)
    run = cluster.run
    cluster.run = lambda *arguments, **more: (run(*arguments, **more), _forget_figure(cluster))[0]  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="no figure of merit") as refusal:
        find(cluster)
    assert "summary.json" in str(refusal.value.hint)
    assert len(cluster.done) == 3


def _forget_figure(cluster: Cluster) -> None:
    cluster.done[-1] = cluster.done[-1]._replace(throughput=None, unit=None)


def test_trials_that_fail_at_the_smallest_size_are_named() -> None:
    cluster = Cluster(perfect, work_s=10)
    cluster.state = State.FAILED
    with pytest.raises(RequestError, match="the trials failed: job 1, 2, 3") as refusal:
        find(cluster)
    assert refusal.value.hint == "hpcjobs why 3"


def test_a_size_whose_trials_fail_bounds_the_answer() -> None:
    cluster = Cluster(perfect, work_s=10)
    run = cluster.run

    def fail_above_5(job: Job, **more: object) -> None:
        run(job, **more)  # type: ignore[arg-type]
        if job.nodes > 5:
            cluster.done[-1] = cluster.done[-1]._replace(state=State.FAILED)
            _forget_figure(cluster)

    cluster.run = fail_above_5  # type: ignore[method-assign]
    answer = find(cluster)
    assert answer.options == {"nodes": "5"}
    assert [reason.partition(" (")[0] for reason in answer.reasons[:-1]] == [
        "trials of 8 nodes failed", "trials of 7 nodes failed", "trials of 6 nodes failed",
    ]  # fmt: skip


def test_several_options_are_chosen_one_after_another() -> None:
    cluster = Cluster(lambda job: min(job.resources.cpus_per_task or 1, 4) * amdahl(job))
    answer = find(cluster, "nodes", "cpus_per_task", min_efficiency=0.82)
    assert answer.options == {"cpus_per_task": "4", "nodes": "2"}
    assert {(row.option, row.value) for row in answer.sizes} >= {("cpus_per_task", "8"), ("nodes", "4")}


def test_the_fastest_launcher_is_chosen() -> None:
    cluster = Cluster(lambda job: {"srun": 1.0, "mpirun": 1.5}[job.launcher])
    answer = find(cluster, "launcher")
    assert (answer.options, len(answer.trials)) == ({"launcher": "mpirun"}, 6)
    assert answer.reasons == ["mpirun is the fastest of srun, mpirun"]


def test_a_site_with_one_size_needs_no_trial() -> None:
    cluster = Cluster(perfect)
    Path("simulated.yaml").write_text(SITE.replace("16", "1"))
    answer = find(cluster)
    assert (answer.options, answer.reasons, cluster.done) == ({"nodes": "1"}, ["1 node is the only size possible"], [])


@pytest.mark.parametrize(("text", "after_s"), [("8h", 8 * HOUR), ("90m", 1.5 * HOUR)])
def test_an_end_may_be_a_time_from_now(text: str, after_s: float) -> None:
    assert parse_finish(text, now=1e9) == 1e9 + after_s


def test_a_time_of_day_is_that_of_the_clock_after_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin the 25th of October has 25 hours: from 18:00 on the 24th, 17:00 is 24 hours away and not 23."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        now = parse_finish("2026-10-24T18:00", now=0)
        assert parse_finish("17:00", now=now) == now + 24 * HOUR
        assert parse_finish("19:00", now=now) == now + HOUR
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_end_may_be_a_clock_time_or_a_date() -> None:
    now = parse_finish("2026-11-30T08:00", now=0)
    assert parse_finish("08:30", now=now) == now + 1800
    assert parse_finish("07:30", now=now) == now + 23.5 * HOUR
    assert parse_finish("08:30:30", now=now) == now + 1830
    assert parse_finish("9:00", now=now) == now + HOUR
    assert parse_finish("2026-11-30T08:00+05:00", now=0) == parse_finish("2026-11-30T03:00Z", now=0) == 1796007600
    for text in ("soon", "25:00", "2026-11-31T08:00", "2026-12-01T08:00 noon"):
        with pytest.raises(RequestError, match=f"--finish-by {text}: no time"):
            parse_finish(text, now=now)
    with pytest.raises(RequestError, match="is in the past"):
        parse_finish("2026-11-29T08:00", now=now)


def test_trials_that_hang_cannot_exceed_the_budget() -> None:
    """The first trials end early, so that the estimate for the next size is low; those run into their limit."""
    cluster = Cluster(lambda job: 1000.0 if job.nodes == 1 else 0.01, work_s=14000, time="1h")
    answer = find(cluster, budget=TrialBudget(None, 180))
    assert answer.options == {"nodes": "1"}
    assert 170 < answer.cost_node_s <= 180
