"""What is said of jobs where the accounting is away for a while, and where there is none at all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row

from hpcjobs.diagnosis.gather import gather_entry
from hpcjobs.files import user_name
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.status import RUNAWAY
from hpcjobs.scheduler.slurm import client

NOW = int(time.time())
AWAY = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"
CONTROLLER_AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
KILLED = "kill -KILL $$"
NONE = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "scontrol"):
        answer(answers, command, ":")
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    monkeypatch.setattr(client, "_PAUSES_S", (0.0,))
    return answers


def job(here: Path, job_id: str, state: str = "RUNNING", *, submitted: int = NOW - 600) -> Entry:
    folder = here / "runs" / f"job{job_id}"
    folder.mkdir(parents=True)
    entry = Entry(job_id, f"job{job_id}", "mine", "slurm", str(folder), float(submitted))
    content = {
        "job_id": job_id,
        "state": state,
        "exit_code": None,
        "started": submitted + 10,
        "ended": None,
        "nodes": "n1",
    }
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    return entry


def records(*arguments: str) -> dict[str, Any]:
    rows = msgspec.json.decode(within("ps", "--json", *arguments).out)
    return {row["record"]["job_id"]: row["record"] for row in rows}


@pytest.mark.parametrize("away", [AWAY, KILLED])
def test_a_job_that_left_the_queue_is_not_unknown_while_the_accounting_is_away(
    here: Path, slurm: Path, away: str
) -> None:
    job(here, "1")
    waiting = job(here, "2", state="FAILED")
    own = {"JobID": 2, "JobName": "job2", "Command": f"{waiting.run_dir}/job.sh"}
    row = queued_row(**own, State="PENDING", Reason="Resources", Submit=NOW - 600)
    answer(slurm, "squeue", print_rows(row))
    answer(slurm, "sacct", away)
    listed = within("ps", "--json")
    assert listed.code == 8
    assert "sacct" in listed.err
    by_id = records()
    assert (by_id["2"]["state"], by_id["2"]["source"]) == ("PENDING", "squeue")
    assert by_id["1"]["reason"] == "it has left the queue, and the accounting does not answer"
    waited = within("wait", "1")
    assert (waited.code, "UNKNOWN" in waited.err) == (8, False)


def test_a_job_out_of_memory_stays_so_when_slurmctld_has_forgotten_it(here: Path, slurm: Path) -> None:
    entry = job(here, "1")
    answer(slurm, "sacct", NONE)
    shown = (
        f"JobId=1 JobName=job1 JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125 SubmitTime={NOW - 600}"
        f" StartTime={NOW - 590} EndTime={NOW - 60} NodeList=n1 NumNodes=1 Command={entry.run_dir}/job.sh"
    )
    answer(slurm, "scontrol", f"case $* in *'show job'*) echo '{shown}';; esac")
    assert records()["1"]["state"] == "OUT_OF_MEMORY"
    answer(slurm, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert records()["1"]["state"] == "OUT_OF_MEMORY"
    assert ok("show", "1").code == 0


def accounted(entry: Entry, state: str, submitted: int) -> str:
    command = f"sbatch --parsable {entry.run_dir}/job.sh"
    values = {"JobName": entry.name, "State": state, "Start": "Unknown", "End": "Unknown", "SubmitLine": command}
    return print_rows(accounted_row(JobID=entry.job_id, Submit=submitted, **values))


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_job_that_squeue_lacks_and_that_sacct_has_as_alive_is_looked_for_again(
    here: Path, slurm: Path, state: str
) -> None:
    """It was requeued by hand since squeue answered, or squeue's answer was cut; by any clock."""
    entry = job(here, "7")
    row = queued_row(JobName="job7", State=state, Submit=NOW - 60, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "sacct", accounted(entry, state, NOW - 60))
    answer(slurm, "squeue", f"[ $(wc -l <{slurm}/squeue.asked) = 1 ] || {print_rows(row)}")
    assert records()["7"]["state"] == state
    counts = {command: len((slurm / f"{command}.asked").read_text().splitlines()) for command in ("squeue", "sacct")}
    assert counts == {"squeue": 2, "sacct": 1}
    (slurm / "squeue.asked").unlink()
    assert within("archive", "7").code == 5
    (slurm / "squeue.asked").unlink()
    answer(slurm, "squeue", f"[ $(wc -l <{slurm}/squeue.asked) = 1 ] || {{ {CONTROLLER_AWAY}; }}")
    listed = within("ps")
    assert listed.code == 8
    assert "no answer from Slurm (squeue" in listed.err


def test_a_job_that_wrote_its_end_and_was_requeued_since_squeue_answered_waits(here: Path, slurm: Path) -> None:
    entry = job(here, "7", state="FAILED")
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "sacct", accounted(entry, "PENDING", NOW - 60))
    answer(slurm, "squeue", f"[ $(wc -l <{slurm}/squeue.asked) = 1 ] || {print_rows(row)}")
    assert records()["7"]["state"] == "PENDING"
    (slurm / "squeue.asked").unlink()
    assert within("archive", "7").code == 5
    # It is listed once more, and then slurmctld is away between two questions.
    answer(slurm, "squeue", f"[ $(wc -l <{slurm}/squeue.asked) = 1 ] || {{ {CONTROLLER_AWAY}; }}")
    for verb in ("archive", "prune"):
        (slurm / "squeue.asked").unlink()
        old = ("prune", "--older-than", "0s", "--remove")
        left = within(*(old if verb == "prune" else (verb, "7")))
        assert left.code == 8, left
        assert Path(entry.run_dir).exists()


def _in_doubt(here: Path) -> tuple[Entry, str]:
    """A job that squeue's first answer lacks, and its row of sacct, which has it as running."""
    entry = job(here, "8")
    return entry, accounted(entry, "RUNNING", NOW - 600)


def test_the_second_answer_of_squeue_counts_for_every_job_that_the_first_lacked(here: Path, slurm: Path) -> None:
    """7 failed, and is requeued by hand while sacct answers; squeue is asked again because of 8."""
    _, running = _in_doubt(here)
    entry = job(here, "7", submitted=NOW - 7200)
    _write_end(entry, "FAILED", NOW - 7000, NOW - 3600)
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 1, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "sacct", f"touch {slurm}/requeued; {running}; {_failed(entry)}")
    answer(slurm, "squeue", f"[ ! -e {slurm}/requeued ] || {print_rows(row)}")
    assert "0 jobs" in ok("prune", "--older-than", "10m", "--remove").out
    assert Path(entry.run_dir).exists()
    (slurm / "requeued").unlink()
    assert records("-a")["7"]["state"] == "PENDING"


@pytest.mark.parametrize("verb", ["cancel", "prune"])
def test_no_running_job_is_taken_for_unknown_when_the_first_answer_of_squeue_was_cut(
    here: Path, slurm: Path, verb: str
) -> None:
    """The accounting has not heard of 7 yet."""
    other, running = _in_doubt(here)
    entry = job(here, "7", submitted=NOW - 40 * 86_400)
    rows = [
        queued_row(JobID=one.job_id, JobName=one.name, Submit=int(one.submitted), Command=f"{one.run_dir}/job.sh")
        for one in (entry, other)
    ]
    answer(slurm, "sacct", f"touch {slurm}/complete; {running}")
    answer(slurm, "squeue", f"[ ! -e {slurm}/complete ] || {print_rows(*rows)}")
    answer(slurm, "scancel", ":")
    if verb == "cancel":
        assert ok("cancel", "7", "8").out.split() == ["cancelled", "7", "8"]
        assert (slurm / "scancel.asked").read_text().split()[-2:] == ["7", "8"]
    else:
        assert "0 jobs" in ok("prune", "--older-than", "0s", "--remove").out
        assert Path(entry.run_dir).exists()


def test_a_completed_job_is_not_cancelled_when_slurmctld_goes_away_between_two_questions(
    here: Path, slurm: Path
) -> None:
    """sacct still has it as waiting."""
    entry = job(here, "7", submitted=NOW - 900)
    _write_end(entry, "COMPLETED", NOW - 100, NOW - 30)
    waiting = accounted(entry, "PENDING", NOW - 900)
    answer(slurm, "sacct", f"touch {slurm}/away; {waiting}")
    answer(slurm, "squeue", f"[ ! -e {slurm}/away ] || {{ {CONTROLLER_AWAY}; }}")
    answer(slurm, "scancel", f"rm {slurm}/away")
    assert within("cancel", "7").code == 8
    (slurm / "away").unlink()
    answer(slurm, "sacct", waiting)
    assert records("-a")["7"]["state"] == "COMPLETED"


def test_a_job_that_completed_before_scancel_is_completed_where_slurmctld_goes_away_after_it(
    here: Path, slurm: Path
) -> None:
    entry = job(here, "7", submitted=NOW - 300)
    (Path(entry.run_dir) / "state.json").unlink()
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 300, Command=f"{entry.run_dir}/job.sh")
    end = {"job_id": "7", "state": "COMPLETED", "exit_code": 0, "started": NOW - 5, "ended": NOW - 1, "nodes": "n1"}
    (slurm / "end.json").write_text(json.dumps(end))
    away = f"[ ! -e {slurm}/away ] || {{ {CONTROLLER_AWAY}; }}; "
    answer(slurm, "squeue", f"{away} [ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled; cp {slurm}/end.json {entry.run_dir}/state.json")
    waiting = accounted(entry, "PENDING", NOW - 300)
    answer(slurm, "sacct", f"touch {slurm}/away; {waiting}")
    ok("cancel", "7")
    (slurm / "away").unlink()
    answer(slurm, "sacct", waiting)
    assert records("-a")["7"]["state"] == "COMPLETED"


@pytest.mark.parametrize("sacct", [NONE, ":"], ids=["no accounting", "late"])
@pytest.mark.parametrize("is_requeued", [True, False])
@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 3)])
def test_a_job_that_was_requeued_and_ended_before_scancel_ended_as_it_wrote(
    here: Path, slurm: Path, sacct: str, is_requeued: bool, state: str, code: int
) -> None:
    """Its own record has the submit time of its login host, which may be earlier than slurmctld's."""
    entry = job(here, "7", submitted=NOW - 7200 if is_requeued else NOW - 300)
    if is_requeued:
        _write_end(entry, "FAILED", NOW - 7000, NOW - 200)
    else:
        (Path(entry.run_dir) / "state.json").unlink()
    submit = NOW - 100 if is_requeued else NOW - 298
    row = queued_row(JobName="job7", State="PENDING", Submit=submit, Command=f"{entry.run_dir}/job.sh")
    end = {"job_id": "7", "state": state, "exit_code": code, "started": NOW - 5, "ended": NOW - 1, "nodes": "n1"}
    (slurm / "end.json").write_text(json.dumps(end))
    answer(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled; cp {slurm}/end.json {entry.run_dir}/state.json")
    answer(slurm, "sacct", sacct)
    ok("cancel", "7")
    shown = records("-a")["7"]
    assert (shown["state"], shown["exit_code"]) == (state, code)


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 3)])
def test_a_job_that_ended_before_scancel_ended_so_where_sacct_has_the_start_before(
    here: Path, slurm: Path, state: str, code: int
) -> None:
    """It failed, was requeued, and started again within the five minutes by which clocks may differ."""
    entry = job(here, "7", submitted=NOW - 150)
    _write_end(entry, "FAILED", NOW - 100, NOW - 60)
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 50, Command=f"{entry.run_dir}/job.sh")
    end = {"job_id": "7", "state": state, "exit_code": code, "started": NOW - 5, "ended": NOW - 1, "nodes": "n1"}
    (slurm / "end.json").write_text(json.dumps(end))
    answer(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled; cp {slurm}/end.json {entry.run_dir}/state.json")
    answer(slurm, "sacct", _failed(entry, started=NOW - 100, ended=NOW - 60))
    ok("cancel", "7")
    shown = records("-a")["7"]
    assert (shown["state"], shown["exit_code"]) == (state, code)
    assert within("wait", "7").code == code


def test_an_outage_at_the_second_question_hides_nothing_of_the_other_jobs(here: Path, slurm: Path) -> None:
    """squeue is asked again because of 8; 7 failed and waits again, and 9 has ended."""
    eight, running = _in_doubt(here)
    seven, nine = (job(here, job_id, submitted=NOW - 7200) for job_id in ("7", "9"))
    _write_end(seven, "FAILED", NOW - 7000, NOW - 3600)
    waiting = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{seven.run_dir}/job.sh")
    again = queued_row(JobID="8", JobName="job8", Submit=NOW - 600, Command=f"{eight.run_dir}/job.sh")
    away = f"case $(wc -l <{slurm}/squeue.asked) in 2|3) {CONTROLLER_AWAY};; esac"
    answer(
        slurm, "squeue", f"{away}; {print_rows(waiting)}; [ $(wc -l <{slurm}/squeue.asked) = 1 ] || {print_rows(again)}"
    )
    answer(slurm, "sacct", f"{running}; {_failed(nine)}")
    answer(slurm, "scancel", ":")
    listed = within("ps", "-a", "--json")
    assert listed.code == 8
    by_id = {row["record"]["job_id"]: row["record"]["state"] for row in json.loads(listed.out)}
    assert by_id == {"7": "PENDING", "8": "RUNNING", "9": "FAILED"}
    (slurm / "squeue.asked").unlink()
    cancelled = within("cancel", "--all")
    assert (cancelled.code, cancelled.out.split()) == (0, ["cancelled", "7", "8"])


def test_cancel_all_says_that_a_scheduler_did_not_answer_first(here: Path, slurm: Path) -> None:
    """What waits is not known then: 7 failed, and waits again."""
    eight, seven = job(here, "8"), job(here, "7", submitted=NOW - 7200)
    _write_end(seven, "FAILED", NOW - 7000, NOW - 3600)
    waiting = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{seven.run_dir}/job.sh")
    running = queued_row(JobID="8", JobName="job8", Submit=NOW - 600, Command=f"{eight.run_dir}/job.sh")
    away = f"case $(wc -l <{slurm}/squeue.asked) in 1|2) {CONTROLLER_AWAY};; esac"
    answer(slurm, "squeue", f"{away}; {print_rows(waiting, running)}")
    answer(slurm, "scancel", ":")
    cancelled = within("cancel", "--all")
    assert (cancelled.code, cancelled.out) == (8, "cancelled 8\n")
    assert "no answer from Slurm" in cancelled.err
    assert ok("cancel", "--all").out == "cancelled 7 8\n"


def test_cancel_all_is_done_where_only_the_accounting_is_away(here: Path, slurm: Path) -> None:
    seven, eight = job(here, "7"), job(here, "8")
    _write_end(eight, "FAILED", NOW - 500, NOW - 400)
    answer(slurm, "squeue", print_rows(queued_row(JobName="job7", Submit=NOW - 600, Command=f"{seven.run_dir}/job.sh")))
    answer(slurm, "sacct", AWAY)
    answer(slurm, "scancel", ":")
    assert ok("cancel", "--all").out == "cancelled 7\n"
    assert ok("cancel", "--all", "--signal", "USR1").out == "USR1 sent to 7\n"
    answer(slurm, "squeue", CONTROLLER_AWAY)
    for entry in (seven, eight):
        _write_end(entry, "FAILED", NOW - 500, NOW - 400)
    nothing = within("cancel", "--all", "--json")
    assert (nothing.code, json.loads(nothing.out)["error"]["exit_code"]) == (8, 8)


def test_a_task_that_is_requeued_while_another_is_ending_is_found_by_the_second_answer(here: Path, slurm: Path) -> None:
    """squeue is asked again because of 8. Task 1 hangs in COMPLETING."""
    _, running = _in_doubt(here)
    folder = here / "runs" / "array"
    entry = Entry("12", "array", "mine", "slurm", str(folder), float(NOW - 7200), array="0-1")
    rows = []
    for task in (0, 1):
        (folder / "tasks" / str(task)).mkdir(parents=True)
        times = {"Submit": NOW - 7200, "Start": NOW - 7000, "End": NOW - 3600}
        own = {"JobID": f"12_{task}", "JobName": "array", "State": "FAILED", "ExitCode": "1:0"}
        rows.append(accounted_row(**own, SubmitLine=f"sbatch --parsable {folder}/job.sh", **times))
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    task_of = {"JobName": "array", "Command": f"{folder}/job.sh"}
    ending = queued_row(JobID="12_1", State="COMPLETING", Submit=NOW - 7200, **task_of)
    waiting = queued_row(JobID="12_0", State="PENDING", Submit=NOW - 1, **task_of)
    answer(slurm, "sacct", f"touch {slurm}/requeued; {running}; {print_rows(*rows)}")
    answer(slurm, "squeue", f"{print_rows(ending)}; [ ! -e {slurm}/requeued ] || {print_rows(waiting)}")
    assert records("-a")["12_0"]["state"] == "PENDING"
    (slurm / "requeued").unlink()
    ok("prune", "--older-than", "10m", "--remove")
    assert folder.exists()


@pytest.mark.parametrize("refused", [False, True])
def test_a_requeued_job_waits_however_long_ago_its_end_was(here: Path, slurm: Path, refused: bool) -> None:
    """It had ended a day and more before the next look. Of several jobs, Slurm refuses one."""
    entries = [job(here, job_id, submitted=NOW - 200_000) for job_id in ("7", "8")]
    for entry in entries:
        _write_end(entry, "FAILED", NOW - 190_000, NOW - 100_000)
    rows = [_failed(entry, started=NOW - 190_000, ended=NOW - 100_000) for entry in entries]
    answer(slurm, "sacct", "; ".join(rows))
    assert records("-a")["7"]["state"] == "FAILED"
    refusal = "echo 'Job has already finished for job 8' >&2; exit 1" if refused else ":"
    answer(slurm, "scontrol", f"case $* in *requeue*) touch {slurm}/requeued; {refusal};; esac")
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 1, Command=f"{entries[0].run_dir}/job.sh")
    answer(slurm, "squeue", f"[ ! -e {slurm}/requeued ] || {print_rows(row)}")
    assert within("requeue", "7", "8").code == (7 if refused else 0)
    assert {job_id: row["state"] for job_id, row in records("-a").items()} == {"7": "PENDING", "8": "FAILED"}
    ok("prune", "--older-than", "1d", "--remove")
    assert [Path(entry.run_dir).exists() for entry in entries] == [True, False]
    answer(slurm, "scancel", ":")
    assert ok("cancel", "7").out == "cancelled 7\n"


@pytest.mark.parametrize("looks", [True, False])
def test_each_requeued_task_is_found_whichever_was_looked_at_before(here: Path, slurm: Path, looks: bool) -> None:
    """Their ends were kept more than a day ago."""
    folder = here / "runs" / "array"
    entry = Entry("12", "array", "mine", "slurm", str(folder), float(NOW - 200_000), array="0-2")
    rows = []
    for task in range(3):
        (folder / str(task)).mkdir(parents=True)
        own = {"JobID": f"12_{task}", "JobName": "array", "State": "FAILED", "ExitCode": "1:0"}
        times = {"Submit": NOW - 200_000, "Start": NOW - 190_000, "End": NOW - 100_000}
        rows.append(accounted_row(**own, SubmitLine=f"sbatch --parsable {folder}/job.sh", **times))
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    answer(slurm, "sacct", print_rows(*rows))
    assert records("-a")["12_0"]["state"] == "FAILED"
    answer(slurm, "scontrol", f"case $* in *requeue*) touch {slurm}/requeued;; esac")
    of_array = {"JobName": "array", "Command": f"{folder}/job.sh", "Submit": NOW - 1}
    waiting = print_rows(queued_row(JobID="12_[0-1]", State="PENDING", **of_array))
    answer(slurm, "squeue", f"[ ! -e {slurm}/requeued ] || {waiting}")
    answer(slurm, "scancel", ":")
    ok("requeue", "12_0", "12_1")
    if looks:
        ok("show", "12_1")
    assert ok("cancel", "12_0").out == "cancelled 12_0\n"
    assert ok("cancel", "12_1").out == "cancelled 12_1\n"
    assert "FAILED" in ok("cancel", "12_2").out


def test_a_job_whose_requeue_was_refused_is_over_without_a_question(here: Path, slurm: Path) -> None:
    entry = job(here, "7", submitted=NOW - 3_100_000)
    _write_end(entry, "FAILED", NOW - 3_090_000, NOW - 3_000_000)
    answer(slurm, "sacct", _failed(entry, started=NOW - 3_090_000, ended=NOW - 3_000_000))
    assert records("-a")["7"]["state"] == "FAILED"
    answer(slurm, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert within("requeue", "7").code == 7
    answer(slurm, "squeue", CONTROLLER_AWAY)
    ok("prune", "--older-than", "1d", "--remove")
    assert not Path(entry.run_dir).exists()


@pytest.mark.skipif(not os.geteuid(), reason="root may enter every folder")
def test_a_running_job_whose_folder_cannot_be_entered_is_requeued(here: Path, slurm: Path) -> None:
    entry = job(here, "7", submitted=NOW - 2000)
    answer(
        slurm, "squeue", print_rows(queued_row(JobName="job7", Submit=NOW - 2000, Command=f"{entry.run_dir}/job.sh"))
    )
    Path(entry.run_dir).chmod(0o600)
    requeued = within("requeue", "7")
    Path(entry.run_dir).chmod(0o755)
    assert requeued.code == 0, requeued


def test_cancel_all_does_not_say_that_there_is_nothing_where_another_cluster_is_dead(here: Path, slurm: Path) -> None:
    """Where its job wrote is not mounted here."""
    index.add(Entry("9", "job9", "other", "slurm", str(here / "gone"), float(NOW - 600), slurm_conf="/dead/slurm.conf"))
    answer(slurm, "squeue", f'[ "$SLURM_CONF" != /dead/slurm.conf ] || {{ {CONTROLLER_AWAY}; }}')
    assert within("cancel", "--all").code == 8


def test_a_requeue_that_does_not_reach_slurm_loses_no_end(here: Path, slurm: Path) -> None:
    entry = job(here, "7")
    answer(slurm, "sacct", NONE)
    shown = (
        f"JobId=7 JobName=job7 JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125 SubmitTime={NOW - 600}"
        f" StartTime={NOW - 590} EndTime={NOW - 60} NodeList=n1 NumNodes=1 Command={entry.run_dir}/job.sh"
    )
    answer(slurm, "scontrol", f"case $* in *requeue*) {CONTROLLER_AWAY};; *'show job'*) echo '{shown}';; esac")
    assert records("-a")["7"]["state"] == "OUT_OF_MEMORY"
    assert within("requeue", "7").code == 8
    answer(slurm, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert records("-a")["7"]["state"] == "OUT_OF_MEMORY"


@pytest.mark.parametrize("sacct", [NONE, ":"], ids=["no accounting", "never heard"])
def test_a_requeue_of_an_array_leaves_the_end_of_a_task_that_slurm_has_forgotten(
    here: Path, slurm: Path, sacct: str
) -> None:
    """Task 2 was cancelled while it waited."""
    folder = here / "runs" / "array"
    entry = Entry("12", "array", "mine", "slurm", str(folder), float(NOW - 7200), array="0-2")

    def write(task: int, state: str, started: int, ended: int | None) -> None:
        (folder / str(task)).mkdir(parents=True, exist_ok=True)
        content = {"job_id": f"12_{task}", "state": state, "exit_code": ended and 0, "started": started, "ended": ended}
        (folder / str(task) / "state.json").write_text(json.dumps({**content, "nodes": "n1"}))

    write(0, "RUNNING", NOW - 7000, None)
    write(1, "RUNNING", NOW - 7000, None)
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    of_array = {"JobName": "array", "Command": f"{folder}/job.sh", "Submit": NOW - 7200}
    running = [queued_row(JobID=f"12_{task}", State="RUNNING", **of_array) for task in (0, 1)]
    waiting = queued_row(JobID="12_2", State="PENDING", **of_array)
    answer(slurm, "sacct", sacct)
    answer(slurm, "squeue", f"{print_rows(*running)}; [ -e {slurm}/cancelled ] || {print_rows(waiting)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled")
    ok("cancel", "12_2")
    answer(slurm, "scontrol", ":")
    ok("requeue", "12")
    answer(slurm, "squeue", print_rows(queued_row(JobID="12_[0-1]", State="PENDING", **{**of_array, "Submit": NOW})))
    assert records("-a")["12_2"]["state"] == "CANCELLED"
    answer(slurm, "squeue", ":")
    for task in (0, 1):
        write(task, "COMPLETED", NOW - 20, NOW - 10)
    assert records("-a")["12_2"]["state"] == "CANCELLED"
    assert within("wait", "12").code == 143


def test_prune_keeps_a_folder_in_which_a_job_with_a_kept_end_waits_again(here: Path, slurm: Path) -> None:
    """7 reruns what lies in the folder of 5."""
    five, seven = job(here, "5", submitted=NOW - 40 * 86_400), job(here, "7", submitted=NOW - 7200)
    _write_end(five, "COMPLETED", NOW - 3_450_000, NOW - 3_440_000)
    (Path(five.run_dir) / "code").mkdir()
    _write_end(seven, "FAILED", NOW - 7000, NOW - 3600)
    (Path(seven.run_dir) / "manifest.json").write_text(json.dumps({"job": {"chdir": f"{five.run_dir}/code"}}))
    answer(slurm, "sacct", _failed(seven))
    assert records("-a")["7"]["state"] == "FAILED"
    requeued = queued_row(JobName="job7", State="PENDING", Submit=NOW - 1, Command=f"{seven.run_dir}/job.sh")
    answer(slurm, "squeue", print_rows(requeued))  # by hand
    ok("prune", "--older-than", "30d", "--remove")
    assert (Path(five.run_dir) / "code").exists()


def test_prune_leaves_a_job_that_is_requeued_while_it_asks(here: Path, slurm: Path) -> None:
    entry = job(here, "7", submitted=NOW - 7200)
    _write_end(entry, "FAILED", NOW - 7000, NOW - 3600)
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 1, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "sacct", f"touch {slurm}/requeued; {_failed(entry)}")
    answer(slurm, "squeue", f"[ ! -e {slurm}/requeued ] || {print_rows(row)}")
    ok("prune", "--older-than", "10m", "--remove")
    assert Path(entry.run_dir).exists()


def test_prune_of_a_site_removes_what_it_may_though_another_cluster_is_dead(here: Path, slurm: Path) -> None:
    """7 reran what lies in the folder of 5, without accounting; both ended long ago."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4}}}\n")
    old = NOW - 60 * 86_400
    five, seven = job(here, "5", submitted=old), job(here, "7", submitted=old + 200)
    _write_end(five, "COMPLETED", old + 10, old + 100)
    (Path(five.run_dir) / "code").mkdir()
    _write_end(seven, "COMPLETED", old + 210, old + 300)
    (Path(seven.run_dir) / "manifest.json").write_text(json.dumps({"job": {"chdir": f"{five.run_dir}/code"}}))
    index.add(Entry("9", "job9", "other", "slurm", str(here / "gone"), float(old), slurm_conf="/dead/slurm.conf"))
    answer(slurm, "sacct", NONE)
    answer(slurm, "squeue", f'[ "$SLURM_CONF" != /dead/slurm.conf ] || {{ {CONTROLLER_AWAY}; }}')
    ok("prune", "--site", "mine", "--remove")
    assert not Path(five.run_dir).exists()
    assert not Path(seven.run_dir).exists()


@pytest.mark.parametrize("answers", [2, 3])
def test_prune_keeps_a_folder_in_which_a_job_waits_when_slurmctld_goes_away_meanwhile(
    here: Path, slurm: Path, answers: int
) -> None:
    """7 reruns what lies in the folder of 5; it failed, and was requeued by hand."""
    _, running = _in_doubt(here)
    five = job(here, "5", submitted=NOW - 9000)
    _write_end(five, "COMPLETED", NOW - 8900, NOW - 8000)
    (Path(five.run_dir) / "code").mkdir()
    seven = job(here, "7", submitted=NOW - 7200)
    _write_end(seven, "FAILED", NOW - 7000, NOW - 3600)
    request = {"job": {"chdir": f"{five.run_dir}/code"}}
    (Path(seven.run_dir) / "manifest.json").write_text(json.dumps(request))
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{seven.run_dir}/job.sh")
    times = {"Submit": NOW - 9000, "Start": NOW - 8900, "End": NOW - 8000}
    command = f"sbatch --parsable {five.run_dir}/job.sh"
    answer(
        slurm,
        "sacct",
        f"{running}; {print_rows(accounted_row(JobID='5', JobName='job5', SubmitLine=command, **times))}",
    )
    limit = f"[ $(wc -l <{slurm}/squeue.asked) -le {answers} ] || {{ {CONTROLLER_AWAY}; }}"
    answer(slurm, "squeue", f"{limit}; {print_rows(row)}")
    within("prune", "--older-than", "10m", "--remove")
    assert (Path(five.run_dir) / "code").exists()


def test_a_cancelled_job_stays_cancelled_when_slurmctld_goes_away_between_two_questions(
    here: Path, slurm: Path
) -> None:
    entry = job(here, "7")
    (Path(entry.run_dir) / "state.json").unlink()
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{entry.run_dir}/job.sh")
    away = f"[ ! -e {slurm}/away ] || {{ {CONTROLLER_AWAY}; }}; "
    answer(slurm, "squeue", f"{away} [ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled")
    waiting = accounted(entry, "PENDING", NOW - 600)
    answer(slurm, "sacct", waiting)
    ok("cancel", "7")
    answer(slurm, "sacct", f"touch {slurm}/away; {waiting}")
    assert within("ps").code == 8
    (slurm / "away").unlink()
    for late in (waiting, ":"):  # the accounting is late, and then it lacks the job
        answer(slurm, "sacct", late)
        assert records("-a")["7"]["state"] == "CANCELLED"
    assert within("wait", "7").code == 143


@pytest.mark.parametrize(("ago_s", "until_s"), [(3600, 10), (60, 10), (600, 600), (60, 60)])
def test_a_job_that_was_requeued_and_cancelled_does_not_have_the_end_of_before(
    here: Path, slurm: Path, ago_s: int, until_s: int
) -> None:
    """The accounting has not heard of the requeue yet. Slurm puts a job back in the second of its end."""
    entry = job(here, "7", submitted=NOW - 7200)
    _write_end(entry, "FAILED", NOW - 7000, NOW - ago_s)
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - until_s, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled")
    answer(slurm, "sacct", _failed(entry, ended=NOW - ago_s))
    ok("cancel", "7")
    assert records("-a")["7"]["state"] == "CANCELLED"
    times = {"Submit": NOW - until_s, "Start": "None", "End": int(time.time())}  # NOW may be long ago
    command = f"sbatch --parsable {entry.run_dir}/job.sh"
    answer(slurm, "sacct", print_rows(accounted_row(JobName="job7", State="CANCELLED", SubmitLine=command, **times)))
    shown = records("-a")["7"]
    assert (shown["state"], shown["source"]) == ("CANCELLED", "sacct")


def _write_end(entry: Entry, state: str, started: int, ended: int) -> None:
    code = int(state != "COMPLETED")
    content = {"job_id": entry.job_id, "state": state, "exit_code": code, "started": started, "ended": ended}
    (Path(entry.run_dir) / "state.json").write_text(json.dumps({**content, "nodes": "n1"}))


def _failed(entry: Entry, *, started: int = NOW - 7000, ended: int = NOW - 3600) -> str:
    times = {"Submit": int(entry.submitted), "Start": started, "End": ended}
    command = f"sbatch --parsable {entry.run_dir}/job.sh"
    return print_rows(
        accounted_row(
            JobID=entry.job_id, JobName=entry.name, State="FAILED", ExitCode="1:0", SubmitLine=command, **times
        )
    )


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_an_old_job_that_squeue_lacks_and_that_the_accounting_has_as_alive_is_not_pruned(
    here: Path, slurm: Path, state: str
) -> None:
    entry = job(here, "7", submitted=NOW - 40 * 86_400)
    answer(slurm, "sacct", accounted(entry, state, NOW - 40 * 86_400))
    shown = records("-a")["7"]
    assert (shown["state"], shown["reason"]) == ("UNKNOWN", RUNAWAY)
    left = within("prune", "--remove")
    assert "0 jobs" in left.out, left
    assert "not listed: 1 job of that age" in left.err
    answer(slurm, "sacct", ":")
    assert "1 job" in ok("prune", "--remove").out
    assert not Path(entry.run_dir).exists()


def test_a_job_that_is_cancelled_as_soon_as_it_was_submitted_is_cancelled(here: Path, slurm: Path) -> None:
    """sacct has it as waiting for some time; nothing else will tell of its end where the accounting loses it."""
    entry = job(here, "7")
    (Path(entry.run_dir) / "state.json").unlink()
    row = queued_row(JobName="job7", State="PENDING", Submit="$(date +%s)", Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled")
    answer(slurm, "sacct", accounted(entry, "PENDING", NOW + 60))  # by the clock of the controller
    assert ok("cancel", "7").out == "cancelled 7\n"
    answer(slurm, "sacct", ":")
    assert records("-a")["7"]["state"] == "CANCELLED"


def test_a_requeued_job_that_is_cancelled_as_it_waits_is_cancelled_though_the_accounting_goes_away(
    here: Path, slurm: Path
) -> None:
    entry = job(here, "7", state="FAILED")
    row = queued_row(JobName="job7", State="PENDING", Submit=NOW - 60, Command=f"{entry.run_dir}/job.sh")
    answer(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {print_rows(row)}")
    answer(slurm, "scancel", f"touch {slurm}/cancelled")
    answer(slurm, "sacct", f"[ ! -e {slurm}/cancelled ] || {{ {AWAY}; }}")
    assert ok("cancel", "7").out == "cancelled 7\n"
    answer(slurm, "sacct", ":")
    assert records("-a")["7"]["state"] == "CANCELLED"


def test_a_short_job_of_sbatch_is_known_while_slurmdbd_has_no_name_for_it(here: Path, slurm: Path) -> None:
    """As seen on Slurm 22.05: for seconds sacct calls a job that has just ended "allocation"."""
    shown = (
        f"JobId=7 JobName=job.sh UserId=root(0) JobState=COMPLETED Reason=None ExitCode=0:0 SubmitTime={NOW - 9}"
        f" StartTime={NOW - 9} EndTime={NOW - 9} NodeList=n1 NumNodes=1 Command={here}/job.sh"
    ).replace("root(0)", f"{user_name()}({os.getuid()})")
    row = accounted_row(JobName="allocation", Partition="", Submit=NOW - 9, ElapsedRaw=0)
    answer(slurm, "scontrol", f"case $* in *'show job'*) echo '{shown}';; esac")
    answer(slurm, "sacct", print_rows(row))
    assert ok("cancel", "7").out == "job 7 had ended before: COMPLETED\n"
    assert ok("wait", "7").code == 0


def test_ps_lists_a_job_of_sbatch_that_the_accounting_does_not_have_yet(here: Path, slurm: Path) -> None:
    row = queued_row(JobName="job.sh", State="COMPLETED", Submit=NOW - 9, Elapsed="0:01", Command=f"{here}/job.sh")
    answer(slurm, "squeue", f"case $* in *states=all*) {print_rows(row)};; esac")
    assert records("-a")["7"]["state"] == "COMPLETED"


def test_the_nodes_of_a_job_that_has_just_ended_are_all_named(here: Path, slurm: Path) -> None:
    """As seen on Slurm 22.05: for seconds the accounting has its first node alone."""
    entry = job(here, "7")
    content = {"job_id": "7", "state": "FAILED", "exit_code": 7, "started": NOW - 60, "ended": NOW - 9}
    (Path(entry.run_dir) / "state.json").write_text(json.dumps({**content, "nodes": "n[1-4]"}))
    times = {"Submit": NOW - 600, "Start": NOW - 60, "End": NOW - 9, "ElapsedRaw": 51}
    row = accounted_row(JobName="allocation", State="FAILED", Partition="", **times, ExitCode="7:0")
    answer(slurm, "sacct", print_rows(row))
    record = records("-a")["7"]
    assert (record["source"], record["node_list"], record["nnodes"]) == ("sacct", "n[1-4]", 4)
    assert "FAILED on n[1-4]" in within("wait", "7").err


def test_why_takes_no_facts_of_another_job_that_was_given_the_same_id(here: Path, slurm: Path) -> None:
    """A controller that lost its state began again at 1."""
    entry = job(here, "1", state="FAILED")
    answer(slurm, "sacct", NONE)
    other = (
        f"JobId=1 JobName=other UserId=eve(7) JobState=NODE_FAIL Reason=NodeDown ExitCode=0:0 SubmitTime={NOW - 60}"
        f" StartTime={NOW - 50} EndTime={NOW - 40} NodeList=n9 NumNodes=1 TimeLimit=00:10:00 Command=/elsewhere/o.sh"
    )
    answer(slurm, "scontrol", f"case $* in *'show job'*) echo '{other}';; esac")
    facts = gather_entry(entry).facts
    assert (facts.name, facts.nodes, facts.time_limit_s) == ("job1", ("n1",), None)
    answer(slurm, "scontrol", f"case $* in *'show job'*) echo '{_of(entry, other)}';; esac")
    assert gather_entry(entry).facts.time_limit_s == 600


def _of(entry: Entry, shown: str) -> str:
    return shown.replace("/elsewhere/o.sh", f"{entry.run_dir}/job.sh").replace("eve(7)", "me(7)")


def test_a_name_of_a_job_that_sbatch_submitted_names_it_in_every_verb_without_accounting(
    here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"Submit": NOW - 60, "Start": NOW - 50, "Elapsed": "0:10"}
    row = queued_row(JobName="plain", State="FAILED", Reason="NonZeroExitCode", **times, Command=here / "plain.sh")
    answer(slurm, "squeue", f'case "$*" in *--states=all*) {print_rows(row)} ;; esac')
    answer(slurm, "sacct", NONE)
    (here / "out.txt").write_text("ValueError: no such batch\n")
    record = (
        f"JobId=7 JobName=plain UserId={user_name()}({os.getuid()}) JobState=FAILED ExitCode=3:0 RunTime=00:00:10"
        f" SubmitTime={NOW - 60} StartTime={NOW - 50} EndTime={NOW - 40} StdOut={here}/out.txt StdErr={here}/out.txt"
    )
    answer(slurm, "scontrol", f'case "$*" in *"show job"*) echo "{record}" ;; esac')
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {main: {nodes: 1, node: {cpus: 4}}}\n")
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    assert "job 7  plain" in ok("show", "plain").out
    assert ok("logs", "plain").out == "ValueError: no such batch\n"
    assert within("wait", "plain").code == 3
    assert ok("why", "plain").out.startswith("job 7  plain: FAILED\n")
    assert "had ended before: FAILED" in within("cancel", "plain").out
    assert "no job named 'plian'" in within("show", "plian").err


def test_a_component_of_a_heterogeneous_job_is_named_as_slurm_names_it_without_accounting(
    here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"JobName": "het", "Submit": NOW - 60, "Start": NOW - 50, "Elapsed": "0:10", "Command": f"{here}/het.sh"}
    rows = queued_row(JobID="5+0", **own), queued_row(JobID="5+1", NodeList="n2", **own)
    answer(slurm, "squeue", print_rows(*rows))
    answer(slurm, "sacct", NONE)
    answer(slurm, "scancel", ":")
    own = f"JobName=het HetJobIdSet=5-6 UserId={user_name()}({os.getuid()}) SubmitTime={NOW - 60} StartTime={NOW - 50}"
    ended = [
        f"JobId={5 + n} HetJobId=5 HetJobOffset={n} {own} EndTime={NOW - 9} JobState={state} ExitCode={n}:0"
        for n, state in enumerate(("COMPLETED", "FAILED"))
    ]
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4}}}\n")
    assert "5+1: RUNNING, on n2" in ok("show", "5+1").out
    all_shown = ok("show", "5").out
    assert "5+0: RUNNING" in all_shown
    assert "5+1: RUNNING, on n2" in all_shown
    assert ok("cancel", "5+1").out == "cancelled 5+1\n"
    assert (slurm / "scancel.asked").read_text().split()[-1] == "5+1"
    assert "no job 5+7 of yours" in within("show", "5+7").err
    answer(slurm, "squeue", ":")
    answer(slurm, "scontrol", "case $* in *'show job'*) echo '" + "\n".join(ended) + "';; esac")
    assert [within("wait", name).code for name in ("5+0", "5+1", "5")] == [0, 1, 1]


def test_the_log_of_a_component_is_that_of_the_first_one_which_runs_the_script(here: Path, slurm: Path) -> None:
    own = {"JobName": "het", "Submit": NOW - 60}
    answer(slurm, "squeue", print_rows(*(queued_row(JobID=f"5+{n}", **own) for n in (0, 1))))
    shown = f"JobName=het HetJobId=5 UserId={user_name()}({os.getuid()}) JobState=RUNNING StdOut={here}/slurm-"
    cases = [f"*'show job {name}'*) echo JobId={n} '{shown}{n}.out';;" for name, n in (("5+1", 6), ("5", 5))]
    answer(slurm, "scontrol", f"case $* in {' '.join(cases)} esac")
    (here / "slurm-5.out").write_text("of the script\n")
    assert ok("logs", "5+1").out == "of the script\n"
    assert ok("show", "5+1").out.endswith(f"log {here}/slurm-5.out\n")
    (here / "slurm-6.out").write_text("of a step\n")
    assert ok("logs", "5+1").out == "of a step\n"


def test_a_heterogeneous_job_lasts_until_its_last_component_has_ended(here: Path, slurm: Path) -> None:
    own = {"JobName": "het", "Submit": NOW - 60, "Start": NOW - 50}
    answer(slurm, "squeue", print_rows(queued_row(JobID="5+0", Elapsed="0:10", **own)))
    answer(slurm, "sacct", print_rows(accounted_row(JobID="5+1", State="FAILED", ExitCode="3:0", End=NOW - 9, **own)))
    shown = ok("show", "5").out
    assert "5+0: RUNNING" in shown
    assert "5+1: FAILED" in shown
    assert "job 5 has not ended after 1 s" in within("wait", "5", "--timeout", "1").err


@pytest.mark.parametrize(("number", "full"), [("6", "5+1"), ("9", "7_2")])
@pytest.mark.parametrize("remembers", [True, False])
def test_a_component_and_a_task_are_known_by_their_slurm_job_id(
    here: Path, slurm: Path, number: str, full: str, remembers: bool
) -> None:
    """What ``echo $SLURM_JOB_ID`` printed there; slurmctld remembers the job, or the accounting alone does."""
    part = "HetJobId=5 HetJobOffset=1" if full == "5+1" else "ArrayJobId=7 ArrayTaskId=2"
    own = f"JobName=mine UserId={user_name()}({os.getuid()}) SubmitTime={NOW - 60} StartTime={NOW - 50}"
    shown = f"JobId={number} {part} {own} EndTime={NOW - 9} JobState=FAILED ExitCode=3:0"
    no_job = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    known = f"echo '{shown}'" if remembers else no_job
    answer(slurm, "scontrol", f"case $* in *'show job {number}') {known};; *'show job'*) {no_job};; esac")
    ended = {"JobName": "mine", "State": "FAILED", "Submit": NOW - 60, "Start": NOW - 50, "End": NOW - 9}
    row = accounted_row(JobID=full, ExitCode="3:0", **ended)
    jobs = f"*jobs={number}|*jobs={number}' '*|*jobs={full.split('+')[0].split('_')[0]}*|*jobs={full}*"
    answer(slurm, "squeue", ":")
    answer(slurm, "sacct", f"case $* in {jobs}) {print_rows(row)};; esac")
    assert f"{full}: FAILED, on n1, for 2s, exit code 3" in ok("show", number).out
    assert within("wait", number).code == 3


def test_the_results_of_a_task_are_not_shown_as_those_of_its_array(here: Path, slurm: Path) -> None:
    folder = here / "runs" / "sweep"
    for task, loss in enumerate((0.25, 0.5)):
        (folder / str(task)).mkdir(parents=True)
        (folder / str(task) / "summary.json").write_text(json.dumps({"loss": loss}))
        state = {"job_id": f"12_{task}", "state": "COMPLETED", "exit_code": 0, "started": NOW - 60, "ended": NOW - 9}
        (folder / str(task) / "state.json").write_text(json.dumps(state | {"nodes": "n1"}))
    index.add(Entry("12", "sweep", "mine", "slurm", str(folder), NOW - 600.0, array="0-1"))
    array = ok("show", "12").out
    assert "loss" not in array
    assert "2 tasks: `hpcjobs show 12_0` prints the attempts, progress and results of one" in array
    assert "  loss: 0.5\n" in ok("show", "12_1").out


def test_of_a_copy_no_command_is_advised_that_shows_another_job(here: Path, slurm: Path) -> None:
    """An id is one of the user's own list, or of the queue; the copy of a run is in neither."""
    copy = here / "copy"
    copy.mkdir()
    record = Entry("12", "sweep", "mine", "slurm", str(copy), NOW - 600.0, array="0-1")
    (copy / "submitted.json").write_bytes(msgspec.json.encode(record))
    assert "hpcjobs show 12" not in ok("show", str(copy)).out


def test_a_code_that_sacct_prints_without_128_is_that_of_the_program(here: Path, slurm: Path) -> None:
    """As seen on Slurm 22.05: ExitCode is 9:0 of a job whose program ended with 137."""
    entry = job(here, "7")
    content = {"job_id": "7", "state": "FAILED", "exit_code": 137, "started": NOW - 60, "ended": NOW - 9, "nodes": "n1"}
    (Path(entry.run_dir) / "state.json").write_text(json.dumps(content))
    times = {"Submit": NOW - 600, "Start": NOW - 60, "End": NOW - 9, "ElapsedRaw": 51}
    row = accounted_row(JobName="job7", State="FAILED", Partition="", **times, ExitCode="9:0")
    answer(slurm, "sacct", print_rows(row))
    assert records("-a")["7"]["exit_code"] == 137
    assert within("wait", "7").code == 137
