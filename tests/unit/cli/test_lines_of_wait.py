"""The lines that `hpcjobs wait` prints while jobs change: one for each change, and none that their end takes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from commandline import within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows

from hpcjobs.cli.follow import _Changes
from hpcjobs.cli.progress import ProgressBars
from hpcjobs.job.models import Plan
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, Submitted

Schedule = list[tuple[float, str]]
"""From when on something says which state."""


class Cluster:
    """Jobs whose state files, queue and accounting say what a schedule has, with a clock that only waiting moves."""

    def __init__(self, folder: Path, files: dict[str, Schedule], queue: dict[str, Schedule], ends: dict[str, Schedule]):
        self.now, self._folder, self._files, self._queue, self._ends = 0.0, folder, files, queue, ends
        self.entries = [Entry(job, "x", "s", "slurm", str(folder / job), 0.0) for job in files]
        for job in files:
            (folder / job).mkdir()

    def connect(self, kind: str, conf: str | None) -> Scheduler:
        return self

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for job, schedule in self._files.items():
            if state := self._at(schedule):
                ended = self.now if State(state).ended else None
                values = {"job_id": job, "state": state, "exit_code": None, "started": 0, "ended": ended, "nodes": "n1"}
                path = self._folder / job / "state.json"
                if not path.exists() or json.loads(path.read_bytes())["state"] != state:
                    path.write_text(json.dumps(values))

    def _at(self, schedule: Schedule) -> str:
        return next((state for since, state in reversed(schedule) if since <= self.now), "")

    def _records(self, schedules: dict[str, Schedule], source: str) -> list[JobRecord]:
        states = {job: self._at(schedule) for job, schedule in schedules.items()}
        return [JobRecord(job, State(state), source) for job, state in states.items() if state]

    def queue(self) -> list[JobRecord]:
        return self._records(self._queue, "squeue")

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        ids = set(job_ids)
        return [record for record in self._records(self._ends, "sacct") if record.job_id in ids]

    def submit(self, plan: Plan) -> Submitted:
        pytest.fail("waiting submits nothing")

    def has_accounting(self) -> bool:
        return True

    def show_jobs(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return []

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        return []

    def cancel(self, job_ids: Iterable[str]) -> None:
        pytest.fail("waiting cancels nothing")


def lines(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `wait` prints, with the time of each line."""
    changes = _Changes(cluster.entries, ProgressBars())
    printed: list[str] = []

    def note_new() -> None:
        printed.extend(
            f"{cluster.now:.0f} {line.partition('job ')[2]}" for line in capsys.readouterr().err.splitlines()
        )

    def show(records: list[JobRecord]) -> None:
        changes.show(records)
        note_new()

    known = wait(cluster.entries, progress=show, connect=cluster.connect, clock=cluster.clock, pause=cluster.pause)
    changes.print_states([record for one in known for record in one.records])
    note_new()
    return printed


def test_a_requeued_job_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: Schedule = [(5, "RUNNING"), (30, "REQUEUED"), (200, "RUNNING"), (250, "COMPLETED")]
    queue: Schedule = [(0, "RUNNING"), (40, "PENDING"), (200, "RUNNING"), (250, "")]
    cluster = Cluster(tmp_path, {"1": files}, {"1": queue}, {"1": [(250, "COMPLETED")]})
    states = [line.split()[2] for line in lines(cluster, capsys)]
    assert states == ["RUNNING", "REQUEUED", "PENDING", "RUNNING", "COMPLETED"]


@pytest.mark.parametrize("end", ["TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED"])
@pytest.mark.parametrize("own", ["FAILED", "CANCELLED"])
def test_the_end_is_the_one_that_the_scheduler_has(
    end: str, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue: Schedule = [(0, "RUNNING"), (30, "COMPLETING"), (33, "")]
    cluster = Cluster(tmp_path, {"1": [(5, "RUNNING"), (30, own)]}, {"1": queue}, {"1": [(33, end)]})
    assert [line.split()[2] for line in lines(cluster, capsys)] == ["RUNNING", end]


def test_a_job_that_failed_while_others_run_is_reported_within_a_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, Schedule] = {"1": [(5, "RUNNING"), (30, "FAILED")], "2": [(5, "RUNNING"), (500, "COMPLETED")]}
    queue: dict[str, Schedule] = {"1": [(0, "RUNNING"), (31, "")], "2": [(0, "RUNNING"), (500, "")]}
    cluster = Cluster(tmp_path, files, queue, {"1": [(31, "FAILED")], "2": [(500, "COMPLETED")]})
    (failure,) = [line for line in lines(cluster, capsys) if line.endswith("1 FAILED")]
    assert float(failure.split()[0]) <= 91


@pytest.mark.parametrize("is_own", [True, False])
def test_a_log_is_named_for_tasks_that_began_and_have_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Of the cancelled array, task 0 failed, 1 was cancelled before its first line, and the others never began."""
    now = int(time.time())
    submit = {"JobName": "x", "Submit": now - 900, "End": now - 600}
    never = {**submit, "Start": "None", "State": "CANCELLED by 1000"}
    rows = [
        accounted_row(**submit, JobID="56_0", State="FAILED", ExitCode="3:0"),
        accounted_row(**submit, JobID="56_1", State="CANCELLED by 1000"),
        accounted_row(**never, JobID="56_3"),
        accounted_row(**never, JobID="56_[2,5%1]"),
    ]
    (slurm := tmp_path / "slurm").mkdir()
    answer(slurm, "squeue", ":")
    answer(slurm, "scontrol", "echo Invalid job id specified >&2; exit 1")
    answer(slurm, "sacct", f"case $* in *JobIDRaw*) ;; *) {print_rows(*rows)};; esac")
    monkeypatch.setenv("PATH", f"{slurm}:/usr/bin:/bin")
    (folder := here / "runs" / "x" / "logs").mkdir(parents=True)
    logs = [f"{folder}/x_56_{task}.out" if is_own else f"{here}/slurm-56_{task}.out" for task in (0, 3)]
    for log in logs:  # that of task 3 is another job's
        Path(log).write_text("the end\n")
    if is_own:
        index.add(Entry("56", "x", "mine", "slurm", str(folder.parent), now - 900.0, array="0-3,5"))
    waited = within("wait", "56").err
    assert [line.partition(" log ")[2] for line in waited.splitlines() if " log " in line] == logs[:1]
    assert "  the end\n" in waited
