"""Commands that change jobs in the queue give Slurm exactly the jobs and settings that they name."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import queued_row
from waiting import eventually

from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.units import task_ids

NOW = time.time()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of a Slurm with an empty queue."""
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "scontrol", "scancel"):
        answer(answers, command, ":")
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    return answers


def job(here: Path, job_id: str, *, array: str | None = None, ended: float | None = None) -> Entry:
    """A recorded job; with ``ended`` it completed then."""
    folder = here / "runs" / f"job{job_id}"
    folder.mkdir(parents=True)
    entry = Entry(job_id, f"job{job_id}", "mine", "slurm", str(folder), NOW - 3600, array=array)
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    if ended is not None:
        record = JobRecord(job_id=job_id, state=State.COMPLETED, source="sacct", ended=ended, exit_code=0)
        (folder / "accounting.json").write_bytes(msgspec.json.encode([record]))
    index.add(entry)
    return entry


def queue(slurm: Path, *tasks: tuple[str, str, Entry]) -> None:
    """squeue answers with these tasks: id, state, and the job that they are of."""
    same = {"Submit": int(NOW - 60), "Start": int(NOW - 50), "Elapsed": "1:00", "NodeList": "n1"}
    rows = (
        queued_row(JobID=job_id, JobName=entry.name, State=state, **same, Command=f"{entry.run_dir}/job.sh")
        for job_id, state, entry in tasks
    )
    (slurm / "queue").write_text("".join(f"{row}\n" for row in rows))
    answer(slurm, "squeue", f"cat {slurm}/queue")


def given(slurm: Path, command: str) -> list[str]:
    """The calls of ``command``."""
    path = slurm / f"{command}.asked"
    return path.read_text().splitlines() if path.exists() else []


def test_cancel_of_a_state_ends_only_the_tasks_of_an_array_that_are_in_it(here: Path, slurm: Path) -> None:
    entry = job(here, "1", array="0-9%2")
    queue(slurm, ("1_0", "RUNNING", entry), ("1_1", "RUNNING", entry), ("1_[2-9%2]", "PENDING", entry))
    assert ok("cancel", "--state", "PENDING", "1").out == "cancelled 1_[2-9]\n"
    assert given(slurm, "scancel") == ["--quiet 1_[2-9]"]
    assert ok("cancel", "--state", "RUNNING", "--all").out == "cancelled 1_0 1_1\n"
    assert ok("cancel", "--signal", "USR1", "--state", "RUNNING", "1").out == "USR1 sent to 1_0 1_1\n"
    assert given(slurm, "scancel")[1:] == ["--quiet 1_0 1_1", "--signal=USR1 1_0 1_1"]


def test_a_task_that_was_cancelled_while_it_waited_is_said_to_be(here: Path, slurm: Path) -> None:
    entry = job(here, "1", array="0-1")
    queue(slurm, ("1_0", "RUNNING", entry), ("1_[1]", "PENDING", entry))
    waits = (slurm / "queue").read_text()
    (slurm / "rest").write_text(waits.splitlines(keepends=True)[0])
    answer(slurm, "scancel", f"cp {slurm}/rest {slurm}/queue")
    ok("cancel", "1_1")
    assert "hpcjobs: state CANCELLED, reason cancelled while it waited\n" in ok("why", "1_1").out
    assert "(cancelled while it waited)\n" in ok("show", "1_1").out


def test_cancel_of_a_state_ends_only_those_tasks_of_a_local_array() -> None:
    ok("submit", "--site", "local", "--launcher", "spawn", "--array", "0-3%1", "--", "sleep", "60")

    def states() -> dict[str, str]:
        rows = ok("ps", "--json", "--site", "local").json
        return {task: row["record"]["state"] for row in rows for task in task_ids(row["record"]["job_id"])}

    eventually(lambda: states().get("L1_0") == "RUNNING")
    ok("cancel", "--state", "PENDING", "L1")
    assert states() == {"L1_0": "RUNNING", "L1_1": "CANCELLED", "L1_2": "CANCELLED", "L1_3": "CANCELLED"}
    ok("cancel", "L1")


def test_cancel_all_ends_a_requeued_job_that_was_accounted_for(here: Path, slurm: Path) -> None:
    entry = job(here, "7", ended=NOW - 1200)
    job(here, "8", ended=NOW - 600)
    queue(slurm, ("7", "RUNNING", entry))
    assert ok("cancel", "--all").out == "cancelled 7\n"
    assert given(slurm, "scancel") == ["--quiet 7"]


def test_cancel_all_ends_a_running_job_whose_run_folder_was_removed(here: Path, slurm: Path) -> None:
    entry = job(here, "7")
    queue(slurm, ("7", "RUNNING", entry))
    Path(entry.run_dir, "submitted.json").unlink()
    Path(entry.run_dir).rmdir()
    assert ok("cancel", "--all").out == "cancelled 7\n"


def test_cancel_all_finds_nothing_where_all_jobs_have_ended(here: Path, slurm: Path) -> None:
    job(here, "8", ended=NOW - 600)
    assert within("cancel", "--all").out == "nothing to cancel\n"


@pytest.mark.parametrize("is_ours", [True, False])
def test_requeue_of_an_ended_job_leaves_a_job_alone_that_got_its_id(here: Path, slurm: Path, is_ours: bool) -> None:
    """A controller that lost its last seconds gives their ids again; the run folder still has the end of the first."""
    ended, other = job(here, "7", ended=NOW - 600), job(here, "8")
    folder = ended.run_dir if is_ours else other.run_dir
    answer(slurm, "scontrol", f"echo JobId=7 JobName=x JobState=RUNNING Command={folder}/job.sh")
    done = within("requeue", "7")
    assert (done.code == 0) == is_ours
    assert ("requeue 7" in given(slurm, "scontrol")) == is_ours
    assert is_ours or f"its id belongs to another job: {folder}/job.sh" in done.err


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("time=2h", "TimeLimit=02:00:00"),
        ("TimeLimit=+45", "TimeLimit=+00:45:00"),
        ("timel+=45", "TimeLimit=+00:45:00"),
        ("Qos=long", "QOS=long"),
        ("arraytask=4", "ArrayTaskThrottle=4"),
        ("comment=JobId=12 TimeLimit=3", "Comment=JobId=12 TimeLimit=3"),
    ],
)
def test_update_gives_slurm_the_setting_by_its_full_name(here: Path, slurm: Path, setting: str, changed: str) -> None:
    queue(slurm, ("11", "PENDING", job(here, "11")))
    assert ok("update", "11", setting).out == f"job 11: {changed}\n"
    assert f"update JobId=11 {changed}" in given(slurm, "scontrol")


@pytest.mark.parametrize(
    "setting", ["JobId=12", "jobid=12", "Job=12", "JobName=x", "Name=x", "Time=3", "UserID=0", "=3"]
)
def test_update_refuses_settings_that_are_not_of_the_list(here: Path, slurm: Path, setting: str) -> None:
    queue(slurm, ("11", "PENDING", job(here, "11")))
    refused = within("update", "11", setting, "TimeLimit=+45")
    assert refused.code == 5
    assert f"update {setting}: " in refused.err
    assert not [call for call in given(slurm, "scontrol") if call.startswith("update")]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("11_0-1,3: Job has already finished\n11_2: No error", 0),
        ("11_[0]: Job/step already completing or completed\n11_[1-3]: No error", 0),
        ("11_0-3: Job has already finished", 7),
        ("11_0: Job has already finished\n11_1: No error\n11_2-3: Access/permission denied", 7),
    ],
)
@pytest.mark.parametrize("command", ["hold 11", "release 11", "update 11 time=2h"])
def test_a_change_of_an_array_succeeds_where_only_tasks_that_have_ended_refuse_it(
    here: Path, slurm: Path, command: str, lines: str, code: int
) -> None:
    """scontrol ends with 1 as soon as one task refuses, and lists what became of each."""
    queue(slurm, ("11_2", "RUNNING", job(here, "11", array="0-3")))
    (slurm / "lines").write_text(f"{lines}\n")
    answer(slurm, "scontrol", f"cat {slurm}/lines >&2; exit 1")
    assert within(*command.split()).code == code


HELD = "echo JobId=3 ArrayJobId=11 ArrayTaskId=2 JobName=x JobState=PENDING Reason=JobHeldUser"
WAITS = "echo JobId=11 ArrayJobId=11 ArrayTaskId=1,3 JobName=x JobState=PENDING Reason=JobArrayTaskLimit"


@pytest.mark.parametrize("named", ["11", "11_2"])
def test_update_refuses_a_nice_value_that_would_release_a_held_task(here: Path, slurm: Path, named: str) -> None:
    """Slurm's scontrol gives a held job with a new nice value a priority above 0."""
    queue(slurm, ("11_[1-3%1]", "PENDING", job(here, "11", array="1-3")))
    answer(slurm, "scontrol", f"case $* in *show*) {WAITS}; {HELD} ;; esac")
    refused = within("update", named, "nice=5")
    assert refused.code == 5
    assert "update nice: 11_2 is held, and Slurm would release it" in refused.err
    assert "`hpcjobs release 11_2` first" in refused.err
    assert not [call for call in given(slurm, "scontrol") if call.startswith("update")]


def test_update_names_an_array_whose_tasks_are_held_by_its_id(here: Path, slurm: Path) -> None:
    """A shell would take brackets for a pattern."""
    queue(slurm, ("11_[1-3]", "PENDING", job(here, "11", array="1-3")))
    answer(slurm, "scontrol", HELD.replace("ArrayTaskId=2", "ArrayTaskId=1-3"))
    refused = within("update", "11", "nice=5")
    assert "update nice: 11 has held tasks, and Slurm would release them" in refused.err
    assert "`hpcjobs release 11` first" in refused.err


def test_update_changes_the_nice_value_of_a_task_beside_a_held_one_and_other_settings_of_that(
    here: Path, slurm: Path
) -> None:
    queue(slurm, ("11_[1-3%1]", "PENDING", job(here, "11", array="1-3")))
    answer(slurm, "scontrol", f"case $* in *show*) {WAITS}; {HELD} ;; esac")
    assert ok("update", "11_3", "nice=5").out == "job 11_3: Nice=5\n"
    assert ok("update", "11_2", "comment=x").out == "job 11_2: Comment=x\n"


def test_20_000_jobs_are_asked_about_and_changed_in_portions(slurm: Path) -> None:
    """One argument of a program holds 128 KiB."""
    ids = [str(1_000_000 + number) for number in range(20_000)]
    scheduler = SlurmScheduler()
    assert scheduler.account(ids) == []
    scheduler.hold(ids)
    scheduler.cancel(ids)
    queried = [call.partition("--jobs=")[2].split(",") for call in given(slurm, "sacct")]
    held = [call.removeprefix("hold ").split(",") for call in given(slurm, "scontrol")]
    cancelled = [call.removeprefix("--quiet ").split() for call in given(slurm, "scancel")]
    for calls in (queried, held, cancelled):
        assert [job_id for call in calls for job_id in call] == ids
        assert len(calls) == 2
