"""How often schedulers are asked while jobs run, and what counts as the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from commandline import ok, within
from msgspec.structs import replace

from hpcjobs.errors import SchedulerDownError, SchedulerError
from hpcjobs.job.models import Plan
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import keep_ends
from hpcjobs.run.logs import follow, paths
from hpcjobs.run.status import Known, statuses
from hpcjobs.run.wait import exit_code, wait
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, Submitted


class Cluster:
    """A scheduler whose jobs end at set times, with a clock that only waiting moves."""

    def __init__(self, folder: Path, ends: dict[str, float], *, array: str | None = None, traps: bool = True) -> None:
        self.now = 0.0
        self.queue_asked: list[float] = []
        self.account_asked: list[float] = []
        self.down_after: float | None = None
        self.up_again: float | None = None
        self.error: SchedulerError = SchedulerDownError("no answer")
        self.codes: dict[str, int] = {}
        self.late: dict[str, float] = {}
        """When the accounting hears of a job, if later than its end."""
        self.accounting_away_until = 0.0
        self.is_accounting_kept = True
        self.bare: dict[str, float] = {}
        """Until when the accounting has an array task under the array's id."""
        self._ends, self._folder, self._traps = ends, folder, traps
        parents = dict.fromkeys(job_id.split("_")[0] for job_id in ends)
        self.entries = [
            Entry(job_id=p, name="x", site="s", scheduler="slurm", run_dir=str(folder / p), submitted=0.0, array=array)
            for p in parents
        ]
        for job_id in ends:
            (folder / job_id.replace("_", "/")).mkdir(parents=True)

    def connect(self, kind: str, conf: str | None) -> Scheduler:
        return self

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        for job_id, end in self._ends.items():
            if before < end <= self.now and self._traps:
                code = self.codes.get(job_id, 0)
                state = {"job_id": job_id, "state": "FAILED" if code else "COMPLETED", "exit_code": code}
                state_file = state | {"started": 0, "ended": end, "nodes": "n1", "restarts": 0, "first_failure": None}
                (self._folder / job_id.replace("_", "/") / "state.json").write_text(json.dumps(state_file))

    def submit(self, plan: Plan) -> Submitted:
        pytest.fail("waiting submits nothing")

    def has_accounting(self) -> bool:
        return self.is_accounting_kept

    def show_jobs(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return []

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        return []

    def queue(self) -> list[JobRecord]:
        self.queue_asked.append(self.now)
        if self.down_after is not None and self.down_after <= self.now < (self.up_again or self.now + 1):
            raise self.error
        return [
            JobRecord(job_id=j, state=State.RUNNING, source="squeue") for j, end in self._ends.items() if end > self.now
        ]

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        self.account_asked.append(self.now)
        if self.now < self.accounting_away_until:
            raise SchedulerDownError("no answer from Slurm (sacct)")
        expected = set(job_ids)
        return [
            JobRecord(
                job_id=j.split("_")[0] if self.now < self.bare.get(j, 0.0) else j,
                source="sacct", exit_code=self.codes.get(j, 0),
                state=State.FAILED if self.codes.get(j) else State.COMPLETED,
            )
            for j, end in self._ends.items()
            if max(end, self.late.get(j, 0.0)) <= self.now and j.split("_")[0] in expected
        ]  # fmt: skip

    def cancel(self, job_ids: Iterable[str]) -> None:
        pytest.fail("waiting cancels nothing")

    def wait(self, timeout_s: float | None = None) -> int:
        known = wait(self.entries, connect=self.connect, clock=self.clock, pause=self.pause, timeout_s=timeout_s)
        return exit_code(known)


def test_a_thousand_jobs_cost_one_queue_query_a_minute_and_one_accounting_query(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {str(n): 100.0 + n / 10 for n in range(1000)})
    assert cluster.wait() == 0
    gaps = [later - earlier for earlier, later in zip(cluster.queue_asked, cluster.queue_asked[1:], strict=False)]
    assert all(gap >= 60 for gap in gaps[:-1])
    assert len(cluster.queue_asked) <= 200 / 60 + 2
    assert len(cluster.account_asked) <= len(cluster.queue_asked)


def test_a_job_that_could_not_write_its_end_is_missed_within_a_minute(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 70.0}, traps=False)
    assert cluster.wait() == 0
    assert 70 <= cluster.now <= 131


def test_a_job_that_ended_long_ago_is_told_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": -1.0}, traps=False)
    assert cluster.wait() == 0
    assert cluster.now < 1


def test_the_exit_code_is_the_first_that_is_not_zero(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 5.0, "2": 3.0, "3": 4.0})
    cluster.codes = {"2": 7, "3": 9}
    assert cluster.wait() == 7


def test_a_job_that_was_cancelled_while_it_waited_ends_with_143_as_one_that_ran(here: Path) -> None:
    ok("submit", "--site", "local", "-t", "1", "sleep", "60")
    ok("submit", "--site", "local", "-t", "1", "--after-any", "L1", "true")
    ok("cancel", "L2", "L1")
    assert [within("wait", job).code for job in ("L1", "L2")] == [143, 143]


@pytest.mark.parametrize(("state", "code"), [("CANCELLED", 143), ("TIMEOUT", 143), ("NODE_FAIL", 1)])
def test_where_slurm_has_no_exit_code_the_state_decides(state: str, code: int, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": -1.0}, traps=False)
    record = JobRecord(job_id="1", source="sacct", state=State.parse(state), exit_code=0)
    assert exit_code([Known(cluster.entries[0], [record])]) == code


def test_an_array_ends_with_its_last_task_and_its_code(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"5_0": 3.0, "5_1": 30.0, "5_2": 9.0}, array="0-2")
    cluster.codes = {"5_2": 4}
    assert cluster.wait() == 4
    assert cluster.now >= 30


def test_an_accounting_that_knows_a_part_of_an_array_is_asked_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"5_0": 3.0, "5_1": 4.0}, array="0-1")
    cluster.late = {"5_0": 5.5}
    known = wait(cluster.entries, connect=cluster.connect, clock=cluster.clock, pause=cluster.pause)
    assert [(record.job_id, record.source) for record in known[0].records] == [("5_0", "sacct"), ("5_1", "sacct")]


def test_the_last_task_of_an_array_accounted_for_under_the_bare_id_is_not_taken_for_the_others(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"5_0": 3.0, "5_1": 4.0}, array="0-1")
    cluster.codes, cluster.bare = {"5_1": 4}, {"5_1": 6.0}
    (known,) = wait(cluster.entries, connect=cluster.connect, clock=cluster.clock, pause=cluster.pause)
    assert {r.job_id: r.exit_code for r in known.records} == {"5_0": 0, "5_1": 4}
    (first,) = statuses([replace(known.entry, task=0)], connect=cluster.connect)
    assert exit_code([first]) == 0


def test_a_scheduler_that_falls_silent_does_not_end_the_waiting(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 200.0})
    cluster.codes = {"1": 3}
    cluster.down_after = 50.0
    assert cluster.wait() == 3


@pytest.mark.parametrize("traps", [True, False])
def test_any_error_of_a_scheduler_that_has_answered_is_survived_and_reported_once(tmp_path: Path, traps: bool) -> None:
    cluster = Cluster(tmp_path, {"1": 300.0}, traps=traps)
    cluster.codes = {"1": 3}
    cluster.error = SchedulerError("squeue refused (exit code 1): Protocol authentication error")
    cluster.down_after, cluster.up_again = 50.0, 1000.0
    reports: list[str] = []
    known = wait(
        cluster.entries, connect=cluster.connect, clock=cluster.clock, pause=cluster.pause, report=reports.append
    )
    assert exit_code(known) == 3
    assert (cluster.now > 1000) is not traps
    (silent, *answers) = reports
    assert "Protocol authentication error" in silent
    assert answers == ([] if traps else ["the scheduler answers again"])


def test_waiting_on_a_silent_scheduler_still_gives_up_in_time(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 300.0}, traps=False)
    cluster.down_after = 50.0
    with pytest.raises(TimeoutError, match="job 1 has not ended after 900 s"):
        cluster.wait(timeout_s=900)


def test_a_scheduler_silent_from_the_start_is_an_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 200.0})
    cluster.down_after = 0.0
    with pytest.raises(SchedulerDownError):
        cluster.wait()


def test_waiting_gives_up_when_told_to_and_names_who_is_left(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 5.0, "2": 500.0})
    with pytest.raises(TimeoutError, match=r"job 2 has not ended after 20 s$"):
        cluster.wait(timeout_s=20)


def test_what_the_accounting_said_is_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 5.0})
    cluster.wait()
    counts = len(cluster.queue_asked), len(cluster.account_asked)
    (known,) = statuses(cluster.entries, connect=cluster.connect)
    assert (known.records[0].state, known.records[0].source) == (State.COMPLETED, "sacct")
    assert (len(cluster.queue_asked), len(cluster.account_asked)) == counts


class Accounted(Cluster):
    """A cluster whose accounting has the end of each job, of its first start."""

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return [replace(r, name="x", started=0.0, ended=self._ends[r.job_id]) for r in super().account(job_ids)]


def write_last_start(folder: Path, *, started: float, ended: float) -> None:
    state = {"job_id": "1", "state": "COMPLETED", "exit_code": 0, "nodes": "n1", "restarts": 1}
    (folder / "1" / "state.json").write_text(json.dumps(state | {"started": started, "ended": ended}))


def test_a_job_that_was_requeued_and_ended_within_minutes_of_its_first_end_is_shown_by_its_last(tmp_path: Path) -> None:
    cluster = Accounted(tmp_path, {"1": 50.0})
    cluster.codes["1"] = 3
    assert cluster.wait() == 3
    assert (tmp_path / "1" / "accounting.json").exists()
    write_last_start(tmp_path, started=160.0, ended=200.0)
    cluster._ends.clear()
    (known,) = statuses(cluster.entries, connect=cluster.connect)
    assert [record.state for record in known.records] == [State.COMPLETED]


@pytest.mark.parametrize("first_end", [50.0, 950.0], ids=["long-before", "just-before"])
def test_an_accounting_that_lacks_the_last_start_of_a_job_does_not_tell_its_end(
    tmp_path: Path, first_end: float
) -> None:
    cluster = Accounted(tmp_path, {"1": first_end})
    cluster.codes["1"] = 3
    cluster.now = 2000.0
    write_last_start(tmp_path, started=1000.0, ended=1500.0)
    (known,) = statuses(cluster.entries, connect=cluster.connect)
    assert [record.state for record in known.records] == [State.COMPLETED]


def test_a_job_nobody_knows_ends_the_waiting_as_a_failure(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1_0": 5.0}, array="0-3")
    cluster._ends.clear()
    assert cluster.wait() == 1


def test_a_task_that_was_cancelled_before_it_began_and_that_no_accounting_has_ends_the_waiting(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1_0": 5.0}, array="0-1")
    assert cluster.wait(timeout_s=3600) == 1
    (known,) = statuses(cluster.entries, connect=cluster.connect)
    assert [(r.job_id, r.state) for r in known.records] == [("1_0", State.COMPLETED), ("1_1", State.UNKNOWN)]


def test_the_kept_end_of_a_task_that_was_cancelled_an_hour_ago_is_not_awaited_in_the_accounting(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1_0": 200.0, "1_1": 65.0}, array="0-1", traps=False)
    cluster.late["1_1"] = 1e9  # it waited: slurmdbd never hears of it
    (entry,) = cluster.entries
    end = JobRecord("1_1", State.CANCELLED, "nobody", ended=time.time() - 3600)
    is_cancelled = False

    def pause(seconds: float) -> None:
        nonlocal is_cancelled
        cluster.pause(seconds)
        if cluster.now >= 65 and not is_cancelled:
            is_cancelled = True
            keep_ends(entry, [end])

    known = wait([entry], connect=cluster.connect, clock=cluster.clock, pause=pause)
    assert exit_code(known) == 143
    assert cluster.now < 270


def test_a_task_whose_run_folder_was_removed_and_that_no_accounting_has_ends_the_waiting(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1_0": 5.0, "1_1": 6.0}, array="0-1", traps=False)
    cluster.late["1_1"] = float("inf")
    shutil.rmtree(tmp_path / "1")
    assert cluster.wait(timeout_s=600.0) == 1
    (known,) = statuses(cluster.entries, connect=cluster.connect)
    assert [(r.job_id, r.state) for r in known.records] == [("1_0", State.COMPLETED), ("1_1", State.UNKNOWN)]


def test_an_arrays_logs_are_followed_together_until_all_tasks_have_ended(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"7_0": 1.0, "7_1": 3.0}, array="0-1")
    (entry,) = cluster.entries
    first, second = paths(entry)
    first.parent.mkdir()
    comes = {
        0.5: (first, "0: one\n1: zwei"),
        0.8: (first, " drei\n"),
        1.5: (second, "0: late\n"),
        2.5: (second, "0: last words without an end"),
    }

    def pause(seconds: float) -> None:
        before = cluster.now
        cluster.pause(seconds)
        for moment, (path, text) in comes.items():
            if before < moment <= cluster.now:
                with path.open("a", encoding="utf-8") as file:
                    file.write(text)

    lines = list(follow(entry, connect=cluster.connect, clock=cluster.clock, pause=pause))
    assert lines == [
        "[0] 0: one\n",
        "[0] 1: zwei drei\n",
        "[1] 0: late\n",
        "[1] 0: last words without an end\n",
    ]
    assert list(follow(entry, rank=1, connect=cluster.connect, pause=pause)) == ["[0] zwei drei\n"]


def test_the_end_of_a_lost_node_is_waited_for_where_the_accounting_is_late(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 70.0}, traps=False)
    cluster.codes["1"], cluster.late["1"] = 3, 160.0
    assert cluster.wait() == 3


def test_a_late_accounting_is_not_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 70.0}, traps=False)
    cluster.late["1"] = 1e9
    with pytest.raises(TimeoutError, match="job 1 has not ended after 90 s"):
        cluster.wait(90)
    assert cluster.now < 105


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_cancelled_job_has_ended_also_where_no_accounting_tells_it_within_the_timeout(
    tmp_path: Path, is_kept: bool
) -> None:
    cluster = Cluster(tmp_path, {"1": -1.0}, traps=False)
    cluster.late["1"], cluster.is_accounting_kept = 1e9, is_kept
    times = {"started": time.time() - 60, "ended": time.time() - 20}
    state = {"job_id": "1", "state": "CANCELLED", "exit_code": 143, "nodes": "n1", "restarts": 0, **times}
    (tmp_path / "1" / "state.json").write_text(json.dumps(state))
    assert cluster.wait(3) == 143


def test_no_end_is_waited_for_where_no_accounting_is_kept(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 70.0}, traps=False)
    cluster.late["1"], cluster.is_accounting_kept = 1e9, False
    assert cluster.wait() == 1
    assert cluster.now < 140


def test_a_job_that_nobody_knows_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": -1.0}, traps=False)
    cluster.late["1"] = 1e9
    assert cluster.wait() == 1
    assert cluster.now < 10


def test_waiting_goes_on_while_the_accounting_is_away(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": 70.0}, traps=False)
    cluster.codes["1"], cluster.accounting_away_until = 3, 1000.0
    assert cluster.wait() == 3
    assert cluster.now >= 1000
