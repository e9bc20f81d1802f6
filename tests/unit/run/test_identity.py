"""Which jobs are ours, where ids repeat: two hosts or clusters with one home, a controller that lost its state."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
from msgspec.structs import replace
from slurm_rows import accounted_row

from hpcjobs.errors import RequestError, SchedulerDownError, SchedulerError
from hpcjobs.files import user_name
from hpcjobs.job.models import Plan
from hpcjobs.run import index, job_files
from hpcjobs.run.control import cancel, control
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import FINAL_AFTER_S, is_closed, keep_ends, read_accounting, read_ends
from hpcjobs.run.listing import listing
from hpcjobs.run.select import newest, select
from hpcjobs.run.status import end_all, is_ours, is_queued, statuses
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, Submitted, reachable_clusters
from hpcjobs.scheduler.slurm.parse import ACCOUNTED, parse_sacct
from hpcjobs.site.machine import cluster_name

NOW = time.time()
SITE = "{description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}, slurm_conf: %s}\n"


class Slurm:
    """A scheduler with the records it is given."""

    def __init__(self, queued: Iterable[JobRecord] = (), accounted: Iterable[JobRecord] = ()) -> None:
        self.queued, self.accounted, self.cancelled = list(queued), list(accounted), list[str]()

    def connect(self, kind: str, conf: str | None) -> Scheduler:
        return self

    def submit(self, plan: Plan) -> Submitted:
        raise AssertionError("nothing is submitted here")

    def show_jobs(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return []

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        return []

    def queue(self) -> list[JobRecord]:
        return self.queued

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        expected = set(job_ids)
        return [record for record in self.accounted if record.job_id.split("_")[0] in expected]

    def cancel(self, job_ids: Iterable[str]) -> None:
        self.cancelled += job_ids


def nobody(kind: str, conf: str | None) -> Scheduler:
    raise AssertionError(f"{kind} {conf} was asked")


@pytest.fixture
def job(tmp_path: Path) -> Entry:
    """A job of cluster alpha, submitted an hour ago."""
    (tmp_path / "slurm.conf").write_text("# the cluster\nclustername=Alpha\nSlurmctldHost=n0\n")
    (tmp_path / "run").mkdir()
    entry = Entry(
        "7", "train", "mine", "slurm", str(tmp_path / "run"), NOW - 3600, "alpha", str(tmp_path / "slurm.conf")
    )
    index.add(entry)
    return entry


def record(state: State, source: str = "squeue", **more: object) -> JobRecord:
    base = JobRecord("7", state, source, name="train", submitted=NOW - 3600, started=NOW - 3590)
    return replace(base, **more)


def write_state(entry: Entry, state: str, **more: object) -> None:
    content = {"job_id": entry.job_id, "state": state, "exit_code": None, "started": NOW - 3590, "ended": None}
    path = Path(entry.run_dir) / "state.json"
    path.write_text(json.dumps(content | {"nodes": "n1"} | more), encoding="utf-8")


def states(entry: Entry, slurm: Slurm) -> list[tuple[State, str]]:
    return [(r.state, r.source) for r in statuses([entry], connect=slurm.connect)[0].records]


def test_the_name_of_the_cluster_is_read_from_its_slurm_conf(job: Entry) -> None:
    assert reachable_clusters("slurm", job.slurm_conf) == {"alpha"}


def test_slurm_itself_is_asked_for_its_name_once_where_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\necho "ClusterName             = Beta"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    cluster_name.cache_clear()
    assert cluster_name(None) == "beta"
    cluster_name.cache_clear()
    assert cluster_name(None) == "beta"
    assert (tmp_path / "asked").read_text() == "show config\n"
    cluster_name.cache_clear()


@pytest.mark.parametrize(
    "stranger",
    [
        {"name": "another"},
        {"user": "eve"},
        {"submitted": NOW - 90_000},
        {"submitted": NOW - 60, "started": NOW - 50},
        {"command": "/home/eve/runs/train-2/job.sh"},
    ],
)
def test_a_record_of_another_job_with_the_same_id_is_never_cancelled_or_believed(
    job: Entry, stranger: dict[str, object]
) -> None:
    job = replace(job, user=user_name())
    alive = Slurm([record(State.RUNNING, **stranger)])
    outcome = cancel([job], connect=alive.connect)
    assert (alive.cancelled, outcome.cancelled) == ([], [])
    ended = Slurm(accounted=[record(State.COMPLETED, "sacct", ended=NOW - 10, exit_code=0, **stranger)])
    assert states(job, ended) == [(State.UNKNOWN, "nobody")]
    write_state(job, "FAILED", exit_code=3, ended=NOW - 3000)
    (known,) = wait([job], connect=ended.connect, pause=lambda seconds: None)
    assert [(r.state, r.exit_code) for r in known.records] == [(State.FAILED, 3)]
    assert not (Path(job.run_dir) / "accounting.json").exists()


def test_a_stranger_in_the_queue_with_the_id_of_our_job_is_listed_as_another_job(
    job: Entry, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SITE % job.slurm_conf)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    write_state(job, "COMPLETED", exit_code=0, ended=NOW - 3000)
    queue = Slurm([record(State.RUNNING, name="theirs", submitted=NOW - 5)])
    rows = listing(since=0.0, connect=queue.connect).rows
    assert [(row.name, row.record.state, row.site) for row in rows] == [
        ("train", State.COMPLETED, "mine"),
        ("theirs", State.RUNNING, None),
    ]


def test_ids_that_begin_again_at_1_overwrite_no_entry(job: Entry) -> None:
    index.add(replace(job, run_dir=f"{job.run_dir}-2", submitted=NOW))
    assert [e.run_dir for e in index.entries()] == [job.run_dir, f"{job.run_dir}-2"]
    assert [e.run_dir for e in select(["7"])] == [f"{job.run_dir}-2"]
    assert select([job.run_dir])[0].submitted == job.submitted


@pytest.mark.parametrize(
    "theirs",
    [{"cluster": "beta"}, {"user": "eve"}, {"scheduler": "local", "cluster": "other-host", "slurm_conf": None}],
)
def test_a_job_of_another_cluster_host_or_user_is_asked_of_nobody_here(job: Entry, theirs: dict[str, object]) -> None:
    there = replace(job, **theirs)
    write_state(there, "RUNNING")
    (known,) = statuses([there], connect=nobody)
    assert known.records[0].state is State.RUNNING
    assert str(known.records[0].reason).startswith("of user eve" if "user" in theirs else "on ")
    with pytest.raises(RequestError, match=r"job 7 \(train\) belongs to"):
        cancel([there], connect=nobody)
    with pytest.raises(RequestError, match=r"job 7 \(train\) belongs to"):
        wait([there], connect=nobody)


def test_an_id_means_the_job_of_this_host_where_two_hosts_gave_it_out(tmp_path: Path) -> None:
    here = os.uname().nodename
    for host, submitted in ((here, 1.0), ("other-host", 2.0)):
        index.add(Entry("L1", "train", "local", "local", str(tmp_path / host), submitted, host))
    assert select(["L1"])[0].cluster == select(["train"])[0].cluster == newest().cluster == here


def test_a_requeued_job_is_ours_though_its_submit_time_is_new(job: Entry) -> None:
    again = {"submitted": NOW - 600, "started": NOW - 500}
    write_state(job, "RUNNING", started=NOW - 498)
    assert states(job, Slurm([record(State.RUNNING, **again)])) == [(State.RUNNING, "squeue")]
    done = record(State.COMPLETED, "sacct", ended=NOW - 400, **again)
    assert states(job, Slurm(accounted=[done])) == [(State.COMPLETED, "sacct")]
    pending = record(State.PENDING, submitted=NOW - 9, started=None, command=f"{job.run_dir}/job.sh")
    assert states(job, Slurm([pending])) == [(State.PENDING, "squeue")]


def test_a_job_requeued_by_hand_is_asked_about_again(job: Entry) -> None:
    write_state(job, "COMPLETED", exit_code=0, ended=NOW - 3000)
    first = record(State.COMPLETED, "sacct", ended=NOW - 3000, exit_code=0)
    assert states(job, Slurm(accounted=[first])) == [(State.COMPLETED, "sacct")]
    is_kept = Path(job.run_dir) / "accounting.json"
    assert is_kept.exists()
    again = {"submitted": NOW - 9, "started": NOW - 5, "command": f"{job.run_dir}/job.sh"}
    assert states(job, Slurm([record(State.RUNNING, **again)])) == [(State.RUNNING, "squeue")]
    assert not is_kept.exists()


def array_with_kept_ends(job: Entry, tasks: int) -> Entry:
    """An array whose tasks wrote FAILED, and have TIMEOUT in the accounting that is kept."""
    array = replace(job, array=f"0-{tasks - 1}")
    for task in range(tasks):
        Path(job.run_dir, f"{task}").mkdir()
        content = {"job_id": f"7_{task}", "state": "FAILED", "exit_code": 85, "nodes": "n1", "restarts": 0}
        times = {"started": NOW - 3590, "ended": NOW - 3000}
        Path(job.run_dir, f"{task}", "state.json").write_text(json.dumps(content | times), encoding="utf-8")
    ends = [record(State.TIMEOUT, "sacct", job_id=f"7_{task}", ended=NOW - 3000) for task in range(tasks)]
    assert states(array, Slurm(accounted=ends)) == [(State.TIMEOUT, "sacct")] * tasks
    assert is_closed(array)
    return array


def test_a_job_that_has_started_again_since_its_kept_end_is_not_closed(job: Entry) -> None:
    """Also while Slurm does not answer that it runs: a closed job is never asked for again."""
    write_state(job, "FAILED", exit_code=85, ended=NOW - 3000)
    ended = record(State.FAILED, "sacct", ended=NOW - 3000, exit_code=85)
    assert states(job, Slurm(accounted=[ended])) == [(State.FAILED, "sacct")]
    assert is_closed(job)
    write_state(job, "RUNNING", started=NOW - 5, restarts=1)
    accounting = (Path(job.run_dir) / "accounting.json").stat()
    os.utime(Path(job.run_dir) / "state.json", ns=(accounting.st_mtime_ns + 10**9, accounting.st_mtime_ns + 10**9))
    assert not is_closed(job)


def test_a_job_that_starts_again_and_ends_while_the_queue_answers_has_its_last_end(job: Entry) -> None:
    """Its kept end was read before that."""
    cancelled = record(State.CANCELLED, "scontrol", ended=NOW - 3000, restarts=0)
    assert states(job, Slurm(accounted=[cancelled])) == [(State.CANCELLED, "scontrol")]

    class Slow(Slurm):
        def queue(self) -> list[JobRecord]:
            write_state(job, "COMPLETED", exit_code=0, started=NOW - 90, ended=NOW - 5, restarts=1)
            status = (Path(job.run_dir) / "accounting.json").stat()
            os.utime(Path(job.run_dir) / "state.json", ns=(status.st_mtime_ns + 10**9, status.st_mtime_ns + 10**9))
            return []

    assert states(job, Slow()) == [(State.COMPLETED, "job")]


def test_the_end_of_a_start_stays_though_that_start_went_on_and_wrote_another_end(job: Entry) -> None:
    """Slurm gave its node up, and the program completed there: without accounting, the end that was kept is all."""
    write_state(job, "RUNNING", started=NOW - 3590)
    assert states(job, Slurm(accounted=[record(State.NODE_FAIL, "scontrol", ended=NOW - 3000)])) == [
        (State.NODE_FAIL, "scontrol")
    ]
    write_state(job, "COMPLETED", exit_code=0, started=NOW - 3590, ended=NOW - 600)
    status = (Path(job.run_dir) / "accounting.json").stat()
    os.utime(Path(job.run_dir) / "state.json", ns=(status.st_mtime_ns + 10**9, status.st_mtime_ns + 10**9))
    assert states(job, Slurm()) == [(State.NODE_FAIL, "scontrol")]


def test_the_end_of_an_earlier_start_does_not_correct_a_time_limit(job: Entry) -> None:
    write_state(job, "FAILED", started=NOW - 3000, ended=NOW - 2980, exit_code=3)
    again = {"submitted": NOW - 2974, "started": NOW - 2854, "command": f"{job.run_dir}/job.sh"}
    met_its_limit = record(State.TIMEOUT, "sacct", ended=NOW - 1054, **again)
    assert states(job, Slurm(accounted=[met_its_limit])) == [(State.TIMEOUT, "sacct")]


def test_a_refused_requeue_leaves_a_cancelled_job_cancelled(job: Entry) -> None:
    class Forgetful(Slurm):
        def hold(self, job_ids: Iterable[str]) -> None: ...

        release = hold

        def requeue(self, job_ids: Iterable[str]) -> None:
            raise SchedulerError("scontrol refused (exit code 1): Invalid job id specified for job 7")

    job = replace(job, user=user_name())
    (Path(job.run_dir) / "control").mkdir()
    write_state(job, "RUNNING", started=NOW - 600)
    alive = Slurm([record(State.RUNNING, command=f"{job.run_dir}/job.sh")])
    assert cancel([job], connect=alive.connect).cancelled == ["7"]
    with pytest.raises(SchedulerError, match="Invalid job id"):
        control("requeue", [job], connect=Forgetful().connect)
    assert states(job, Slurm()) == [(State.CANCELLED, "nobody")]


@pytest.mark.parametrize("state", [State.RUNNING, State.PENDING])
def test_a_cancellation_is_noted_for_a_job_that_has_begun_and_may_request_its_own_requeue(
    job: Entry, state: State
) -> None:
    """Slurm forgets a cancellation that a requeue follows; the start that follows reads the note, and ends."""
    job, folder = replace(job, user=user_name()), Path(job.run_dir) / "control"
    folder.mkdir()
    alive = Slurm([record(state, command=f"{job.run_dir}/job.sh")])
    assert cancel([job], connect=alive.connect).cancelled == ["7"]
    assert (folder / "cancelled").exists()


def test_a_requeued_job_that_was_cancelled_while_it_waited_is_cancelled_once_slurm_has_forgotten_it(job: Entry) -> None:
    """The answer of squeue after the cancellation was lost, and the accounting has the lost node alone."""
    job = replace(job, user=user_name())
    (Path(job.run_dir) / "control").mkdir()
    write_state(job, "RUNNING", started=NOW - 600)
    waits = Slurm([record(State.PENDING, command=f"{job.run_dir}/job.sh")])

    class Silent(Slurm):
        def queue(self) -> list[JobRecord]:
            raise SchedulerDownError("squeue: Slurm does not answer")

    schedulers = iter([waits, waits, Silent()])
    assert cancel([job], connect=lambda *_: next(schedulers, Silent())).cancelled == ["7"]
    assert states(job, Slurm()) == [(State.CANCELLED, "nobody")]


def test_a_job_that_was_cancelled_before_it_began_is_cancelled_also_where_slurm_forgot_it_at_once(job: Entry) -> None:
    """Without accounting; scancel was repeated for longer than MinJobAge, as its answer was lost."""
    job = replace(job, user=user_name())
    waits = Slurm([record(State.PENDING, command=f"{job.run_dir}/job.sh")])
    schedulers = iter([waits, waits])
    assert cancel([job], connect=lambda *_: next(schedulers, Slurm())).cancelled == ["7"]
    assert states(job, Slurm()) == [(State.CANCELLED, "nobody")]


def test_the_end_of_a_cancelled_job_is_the_accountings_where_there_is_one(job: Entry) -> None:
    """It began between the question and the cancellation, and the accounting is some seconds late."""
    job = replace(job, user=user_name())
    waits = Slurm([record(State.PENDING, command=f"{job.run_dir}/job.sh")])
    schedulers = iter([waits, waits])
    assert cancel([job], connect=lambda *_: next(schedulers, Slurm())).cancelled == ["7"]
    assert states(job, Slurm()) == [(State.CANCELLED, "nobody")]
    failed = record(State.FAILED, "sacct", ended=time.time(), exit_code=7)
    assert states(job, Slurm(accounted=[failed])) == [(State.FAILED, "sacct")]


@pytest.mark.parametrize(("array", "late"), [(None, "7"), ("0-3", "7_[0-3]")])
def test_a_job_that_was_cancelled_while_it_waited_is_cancelled_though_the_accounting_still_has_it_waiting(
    job: Entry, array: str | None, late: str
) -> None:
    job = replace(job, user=user_name(), array=array)
    row = record(State.PENDING, job_id=late, command=f"{job.run_dir}/job.sh")
    schedulers = iter([Slurm([row]), Slurm([row])])
    assert cancel([job], connect=lambda *_: next(schedulers, Slurm())).cancelled == ["7"]
    accounted = replace(row, source="sacct", started=None)
    assert {state for state, _ in states(job, Slurm(accounted=[accounted]))} == {State.CANCELLED}


def test_two_commands_that_keep_ends_of_different_tasks_at_once_keep_both(
    job: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, both_read = replace(job, array="0-1"), Barrier(2)
    (Path(job.run_dir) / "submitted.json").write_text("{}")

    def read_together(entry: Entry) -> list[JobRecord]:
        records = read_ends(entry)
        with suppress(BrokenBarrierError):  # one of them waits for the other to have written
            both_read.wait(0.5)
        return records

    monkeypatch.setattr(job_files, "read_ends", read_together)
    ends = [record(State.CANCELLED, "nobody", job_id=f"7_{n}", ended=NOW) for n in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda end: keep_ends(array, [end]), ends))
    assert sorted(end.job_id for end in read_ends(array)) == ["7_0", "7_1"]


def test_ends_are_kept_though_a_command_that_keeps_others_was_stopped(
    job: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "_LOCK_TRIES", 2)
    with open(Path(job.run_dir) / "submitted.json", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keep_ends(job, [record(State.CANCELLED, "nobody", ended=NOW)])
    assert [end.state for end in read_ends(job)] == [State.CANCELLED]


@pytest.mark.parametrize(
    ("reason", "is_held"),
    [("JobHeldUser", True), ("JobHeldUser,JobHeldAdmin", True), ("Priority,job_requeued_in_held_state", False)],
)
def test_tasks_in_one_row_are_held_where_all_of_them_are(reason: str, is_held: bool) -> None:
    assert record(State.PENDING, reason=reason).is_held == is_held


def test_waiting_tasks_that_were_cancelled_and_forgotten_are_cancelled_beside_one_that_ran(job: Entry) -> None:
    array = replace(job, user=user_name(), array="0-3")
    at = {"command": f"{job.run_dir}/job.sh"}
    alive = Slurm([record(State.RUNNING, job_id="7_0", **at), record(State.PENDING, job_id="7_[1-3]", **at)])
    schedulers = iter([alive, alive])
    assert cancel([array], connect=lambda *_: next(schedulers, Slurm())).cancelled == ["7"]
    ended = record(State.CANCELLED, "scontrol", job_id="7_0", ended=NOW, **at)
    assert sorted(states(array, Slurm(accounted=[ended]))) == [
        *3 * [(State.CANCELLED, "nobody")],
        (State.CANCELLED, "scontrol"),
    ]


def test_a_cancelled_task_leaves_the_others_of_its_waiting_array_alone(job: Entry) -> None:
    array = replace(job, user=user_name(), array="0-3")
    rows = [record(State.PENDING, job_id=tasks, command=f"{job.run_dir}/job.sh") for tasks in ("7_[0-3]", "7_[0-2]")]
    before, after = (Slurm([row]) for row in rows)
    schedulers = iter([before, before])
    assert cancel([replace(array, task=3)], connect=lambda *_: next(schedulers, after)).cancelled == ["7_3"]
    assert [r.job_id for r in read_ends(array)] == ["7_3"]
    assert states(array, after) == [(State.PENDING, "squeue"), (State.CANCELLED, "nobody")]
    assert states(replace(array, task=3), after) == [(State.CANCELLED, "nobody")]


def test_a_task_that_begins_as_its_array_is_cancelled_leaves_the_others_their_end(job: Entry) -> None:
    array = replace(job, user=user_name(), array="0-3")
    at = {"command": f"{job.run_dir}/job.sh"}
    waits = Slurm([record(State.PENDING, job_id="7_[0-3]", **at)])
    schedulers = iter([waits, waits])
    begun = Slurm([record(State.COMPLETING, job_id="7_0", **at)])
    assert cancel([array], connect=lambda *_: next(schedulers, begun)).cancelled == ["7"]
    assert [r.job_id for r in read_ends(array)] == ["7_1", "7_2", "7_3"]


def test_a_cancelled_job_that_waited_for_another_start_has_not_the_end_of_its_first_one(job: Entry) -> None:
    job = replace(job, user=user_name())
    write_state(job, "COMPLETED", ended=NOW - 900, exit_code=0)
    waits = Slurm([record(State.PENDING, command=f"{job.run_dir}/job.sh")])
    schedulers = iter([waits, waits])
    assert cancel([job], connect=lambda *_: next(schedulers, Slurm())).cancelled == ["7"]
    assert states(job, Slurm()) == [(State.CANCELLED, "nobody")]


def test_a_cancelled_task_that_was_requeued_and_has_completed_is_completed(job: Entry) -> None:
    array, begun = replace(job, user=user_name(), array="0-3"), time.time()
    at = {"command": f"{job.run_dir}/job.sh"}
    before, after = (Slurm([record(State.PENDING, job_id=tasks, **at)]) for tasks in ("7_[0-3]", "7_[0-1,3]"))
    schedulers = iter([before, before])
    assert cancel([replace(array, task=2)], connect=lambda *_: next(schedulers, after)).cancelled == ["7_2"]
    (folder := Path(job.run_dir) / "2").mkdir()
    state = {"job_id": "7_2", "state": "COMPLETED", "exit_code": 0, "started": begun + 1, "ended": begun + 2}
    (folder / "state.json").write_text(json.dumps(state | {"nodes": "n1"}))
    os.utime(folder / "state.json", (begun + 2, begun + 2))
    assert states(replace(array, task=2), after) == [(State.COMPLETED, "job")]


def test_the_script_of_a_job_is_known_in_a_folder_with_a_blank_and_a_minus(job: Entry, tmp_path: Path) -> None:
    folder = tmp_path / "my -old"
    folder.mkdir()
    row = accounted_row(JobID=7, JobName="train", SubmitLine=f"sbatch --parsable {folder}/job.sh")
    (only,) = parse_sacct(row + "\n", ACCOUNTED)
    assert is_ours(replace(job, run_dir=str(folder), submitted=NOW - 90_000), only)


def test_a_cancellation_that_slurm_did_not_take_leaves_no_note(job: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    job, folder = replace(job, user=user_name()), Path(job.run_dir) / "control"
    folder.mkdir()
    alive = Slurm([record(State.RUNNING, command=f"{job.run_dir}/job.sh")])

    def refuse(job_ids: Iterable[str]) -> None:
        assert (folder / "cancelled").exists()
        raise SchedulerDownError("scancel: Slurm does not answer")

    monkeypatch.setattr(alive, "cancel", refuse)
    with pytest.raises(SchedulerDownError):
        cancel([job], connect=alive.connect)
    assert not (folder / "cancelled").exists()


@pytest.mark.parametrize("accounted", [[], [record(State.REQUEUED, "sacct", ended=NOW - 5)]])
def test_a_job_that_was_cancelled_as_it_requeued_itself_is_cancelled_once_slurm_has_forgotten_it(
    job: Entry, accounted: list[JobRecord]
) -> None:
    """It writes no end, and the accounting has the requeue alone."""
    job, folder = replace(job, user=user_name()), Path(job.run_dir) / "control"
    folder.mkdir()
    write_state(job, "RUNNING", started=NOW - 600)
    assert states(job, Slurm(accounted=accounted)) == [(State.UNKNOWN, "nobody")]
    alive = Slurm([record(State.RUNNING, command=f"{job.run_dir}/job.sh")])
    assert cancel([job], connect=alive.connect).cancelled == ["7"]
    (known,) = statuses([job], connect=Slurm(accounted=accounted).connect)
    assert [(r.state, r.source) for r in known.records] == [(State.CANCELLED, "nobody")]
    assert abs((known.records[0].ended or 0) - time.time()) < 60, "prune counts from its end"


@pytest.mark.parametrize(
    ("restarts", "wrote", "accounted", "expected"),
    [
        (1, "COMPLETED", State.NODE_FAIL, (State.COMPLETED, "job")),
        (0, "COMPLETED", State.NODE_FAIL, (State.NODE_FAIL, "sacct")),
        (1, "FAILED", State.NODE_FAIL, (State.NODE_FAIL, "sacct")),
        (1, "COMPLETED", State.OUT_OF_MEMORY, (State.OUT_OF_MEMORY, "sacct")),
    ],
)
def test_an_end_that_slurm_put_back_is_no_end_of_a_job_that_completed_minutes_later(
    job: Entry, restarts: int, wrote: str, accounted: State, expected: tuple[State, str]
) -> None:
    """Its node failed, and it started again at once; the accounting has lost the second end, or has it later.

    Another end may be that of the last start, on a node whose clock is ahead.
    """
    job = replace(job, user=user_name())
    failed = record(accounted, "sacct", started=NOW - 3590, ended=NOW - 3400)
    write_state(job, wrote, exit_code=0, started=NOW - 3390, ended=NOW - 600, restarts=restarts)
    assert states(job, Slurm(accounted=[failed])) == [expected]


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_job_that_is_submitted_while_the_queue_is_listed_is_not_unknown_or_foreign(
    job: Entry, here: Path, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    """The list of jobs has it by then, and the answer of the queue may be older, or not."""
    slurm = Slurm([record(State.RUNNING)])
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SITE % job.slurm_conf)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")

    def answer() -> list[JobRecord]:
        (Path(job.run_dir) / "new").mkdir()
        index.add(replace(job, job_id="8", run_dir=f"{job.run_dir}/new", submitted=time.time()))
        return slurm.queued + ([record(State.PENDING, job_id="8", submitted=time.time())] if is_queued else [])

    monkeypatch.setattr(slurm, "queue", answer)
    rows = listing(since=0.0, connect=slurm.connect).rows
    ids = ["7", "8"] if is_queued else ["7"]
    assert [(row.record.job_id, row.site) for row in rows] == [(job_id, "mine") for job_id in ids]
    assert State.UNKNOWN not in [row.record.state for row in rows]


def test_a_job_that_has_just_started_is_not_cancelled_by_the_id_that_a_stranger_has(job: Entry) -> None:
    job = replace(job, user=user_name())
    write_state(job, "RUNNING", started=time.time() - 100)
    slurm = Slurm([record(State.RUNNING, name="theirs", submitted=NOW - 5, started=NOW - 4, user=user_name())])
    assert cancel([job], connect=slurm.connect).cancelled == []
    assert slurm.cancelled == []


def test_the_kept_ends_of_an_array_stay_while_one_of_its_tasks_is_requeued(job: Entry) -> None:
    """Its other tasks are shown as the accounting had them, and not as they wrote."""
    array = array_with_kept_ends(job, 2)
    again = record(State.RUNNING, job_id="7_1", started=NOW - 5, command=f"{job.run_dir}/job.sh")
    for _ in range(2):
        assert states(array, Slurm([again])) == [(State.RUNNING, "squeue"), (State.TIMEOUT, "sacct")]
        assert not is_closed(array)
        assert read_accounting(array) is None


def test_a_question_about_one_requeued_task_of_an_array_leaves_the_kept_ends_of_the_others(job: Entry) -> None:
    array = array_with_kept_ends(job, 3)
    again = record(State.RUNNING, job_id="7_1", started=NOW - 5, command=f"{job.run_dir}/job.sh")
    assert states(replace(array, task=1), Slurm([again])) == [(State.RUNNING, "squeue")]
    rest = [(State.TIMEOUT, "sacct")] * 2
    assert states(array, Slurm([again])) == [(State.RUNNING, "squeue"), *rest]
    end = record(State.COMPLETED, "sacct", job_id="7_1", started=NOW - 5, ended=NOW - 1, exit_code=0)
    assert states(replace(array, task=1), Slurm(accounted=[end])) == [(State.COMPLETED, "sacct")]
    assert states(array, Slurm([again])) == [(State.RUNNING, "squeue"), *rest]


def test_kept_ends_of_an_array_count_while_a_task_runs_again_and_the_scheduler_is_silent(job: Entry) -> None:
    array = array_with_kept_ends(job, 2)
    again = record(State.RUNNING, job_id="7_1", started=NOW - 5, command=f"{job.run_dir}/job.sh")
    states(array, Slurm([again]))
    content = {"job_id": "7_1", "state": "RUNNING", "exit_code": None, "nodes": "n1", "restarts": 1}
    times = {"started": NOW - 5, "ended": None}
    Path(job.run_dir, "1", "state.json").write_text(json.dumps(content | times), encoding="utf-8")

    class Silent(Slurm):
        """Without slurmctld, or without the accounting alone."""

        def __init__(self, *, queue_answers: bool) -> None:
            super().__init__()
            self.queue_answers = queue_answers

        def queue(self) -> list[JobRecord]:
            if self.queue_answers:
                return []
            raise SchedulerDownError("slurmctld is away")

        def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
            raise SchedulerDownError("the accounting is away")

    def read_states(entry: Entry, slurm: Slurm) -> dict[str, tuple[State, str]]:
        (known,) = statuses([entry], connect=slurm.connect, errors=[])
        return {one.job_id: (one.state, one.source) for one in known.records}

    expected = {"7_0": (State.TIMEOUT, "sacct"), "7_1": (State.RUNNING, "job")}
    assert read_states(array, Silent(queue_answers=False)) == expected
    assert read_states(array, Silent(queue_answers=True)) == expected
    assert read_states(replace(array, cluster="beta"), Slurm()) == expected
    index.add(array)
    end_all(str(job.slurm_conf))
    assert read_states(array, Slurm()) == {"7_0": (State.TIMEOUT, "sacct"), "7_1": (State.CANCELLED, "sandbox")}


def test_what_a_job_wrote_after_its_accounting_was_kept_makes_it_be_asked_again(job: Entry) -> None:
    is_kept = record(State.COMPLETED, "sacct", ended=NOW - 90_000)
    assert states(job, Slurm(accounted=[is_kept])) == [(State.COMPLETED, "sacct")]
    write_state(job, "FAILED", started=NOW - 60, ended=NOW - 50, exit_code=4)
    later = time.time() + 60
    os.utime(Path(job.run_dir) / "state.json", (later, later))
    second = record(State.FAILED, "sacct", submitted=NOW - 70, started=NOW - 61, ended=NOW - 49, exit_code=4)
    assert states(job, Slurm(accounted=[second])) == [(State.FAILED, "sacct")]


def test_a_killed_job_that_its_scheduler_no_longer_knows_does_not_run_for_ever(job: Entry) -> None:
    write_state(job, "RUNNING")
    (known,) = statuses([job], connect=Slurm().connect)
    assert known.records[0].state is State.UNKNOWN
    assert known.records[0].reason == "its scheduler no longer knows it, and it wrote no end"
    assert wait([job], connect=Slurm().connect, pause=lambda seconds: None)[0].records[0].state is State.UNKNOWN


def test_the_accountings_end_counts_where_the_job_still_says_running(job: Entry) -> None:
    write_state(job, "RUNNING")
    end = record(State.CANCELLED, "sacct", ended=NOW - 5)
    assert states(job, Slurm(accounted=[end])) == [(State.CANCELLED, "sacct")]


@pytest.mark.parametrize(
    ("early", "is_kept"),
    [
        ({"node_list": "n1", "ended": -2.0}, True),
        ({"node_list": "n[1-2]", "ended": -2.0}, True),
        ({"node_list": "n1", "ended": -2.0 - FINAL_AFTER_S}, True),
        ({"name": None, "node_list": "n1", "ended": -2.0}, False),
    ],
)
def test_an_accounting_record_is_kept_once_it_agrees_with_the_job(
    job: Entry, early: dict[str, object], is_kept: bool
) -> None:
    early = early | {"ended": time.time() + float(str(early["ended"]))}  # the module may have been read minutes ago
    write_state(job, "FAILED", exit_code=1, ended=early["ended"], nodes="n[1-2]")
    states(job, Slurm(accounted=[record(State.FAILED, "sacct", exit_code=1, **early)]))
    assert (Path(job.run_dir) / "accounting.json").exists() == is_kept


def test_a_sweep_takes_no_stranger_in_the_queue_for_its_own_array(job: Entry) -> None:
    assert is_queued(replace(job, array="0-3"), [record(State.PENDING, job_id="7_[0-3]")])
    assert not is_queued(job, [record(State.PENDING, name="theirs")])
    assert not is_queued(replace(job, cluster="beta"), [record(State.PENDING)])


@pytest.fixture
def array(job: Entry) -> Entry:
    """Two tasks that completed 50 minutes ago; the second was requeued then, and cancelled while it waited."""
    array = replace(job, array="0-1")
    run_dir = Path(job.run_dir)
    for task in ("0", "1"):
        (run_dir / task).mkdir()
        content = {"job_id": f"7_{task}", "state": "COMPLETED", "exit_code": 0, "started": NOW - 3590}
        (run_dir / task / "state.json").write_text(json.dumps(content | {"ended": NOW - 3000, "nodes": "n1"}))
        os.utime(run_dir / task / "state.json", (NOW - 3000, NOW - 3000))
    return array


@pytest.mark.parametrize("task", [None, 1], ids=["array", "task"])
def test_without_accounting_the_last_end_of_one_task_is_kept_when_slurm_forgets_it(
    array: Entry, task: int | None
) -> None:
    entry = replace(array, task=task)
    cancelled = record(State.CANCELLED, "scontrol", job_id="7_1", started=None, ended=NOW - 60, restarts=1)
    for known in ([cancelled], []):
        (status,) = statuses([entry], connect=Slurm(accounted=known).connect)
        assert ("7_1", State.CANCELLED) in [(r.job_id, r.state) for r in status.records]


def test_an_accounting_that_lacks_the_last_start_does_not_replace_the_end_that_was_kept(array: Entry) -> None:
    cancelled = record(State.CANCELLED, "scontrol", job_id="7_1", started=None, ended=NOW - 600, restarts=1)
    earlier = [record(State.COMPLETED, "sacct", job_id=f"7_{task}", ended=NOW - 3000) for task in (0, 1)]
    for known in ([cancelled], earlier, []):
        (status,) = statuses([array], connect=Slurm(accounted=known).connect)
        assert {r.job_id: r.state for r in status.records} == {"7_0": State.COMPLETED, "7_1": State.CANCELLED}


def test_waiting_tasks_of_a_cancelled_array_are_cancelled_while_the_first_one_is_completing(job: Entry) -> None:
    array, folder = replace(job, array="0-2"), Path(job.run_dir, "0")
    folder.mkdir()
    content = {"job_id": "7_0", "state": "RUNNING", "exit_code": None, "started": NOW - 3590, "ended": None}
    (folder / "state.json").write_text(json.dumps(content | {"nodes": "n1"}))
    ending = record(State.COMPLETING, job_id="7_0")
    waited = record(State.CANCELLED, "sacct", job_id="7_[1-2]", started=None, ended=NOW - 10)
    slurm = Slurm([ending], [waited, record(State.RUNNING, "sacct", job_id="7_0")])
    ((_, records),) = statuses([array], connect=slurm.connect)
    assert {one.job_id: one.state for one in records} == {"7_0": State.COMPLETING, "7_[1-2]": State.CANCELLED}
