"""What is known of a job that submitted the one that continues it, and was killed before it could record that."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row

from hpcjobs.run import index
from hpcjobs.run.index import Entry

NOW = int(time.time())
HOUR_AGO = NOW - 3600


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "scontrol", "scancel"):
        answer(answers, command, ":")
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    return answers


@pytest.fixture
def job(here: Path) -> Entry:
    """Job 1, which was preempted, saved, and was killed after it had called sbatch."""
    folder = here / "runs" / "job"
    (folder / "control").mkdir(parents=True)
    entry = Entry("1", "job", "mine", "slurm", str(folder), NOW - 7200.0)
    end = {"job_id": "1", "started": NOW - 7100, "ended": HOUR_AGO, "nodes": "n1", "exit_code": 85}
    state = {**end, "state": "REQUEUED"}
    attempt = {**end, "cause": "preempt", "steps": 5, "saved": 5, "decision": "requeued"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    return entry


def queued(job_id: str, state: str, script: str) -> str:
    waits = {"Reason": "Dependency", "NodeList": "", "Start": "N/A", "Elapsed": "0:00"}
    return queued_row(JobID=job_id, State=state, Submit=HOUR_AGO, Command=script, **waits)


def accounted(job_id: str, state: str, submitted: int, ended: int, code: int) -> str:
    times = {"Submit": submitted, "Start": submitted + 10, "End": ended, "ElapsedRaw": ended - submitted}
    return accounted_row(JobID=job_id, State=state, **times, ExitCode=f"{code}:0")


def test_ps_show_wait_and_cancel_know_the_job_that_continues_it(job: Entry, slurm: Path) -> None:
    script = f"{job.run_dir}/job.sh"
    first = accounted("1", "FAILED", NOW - 7200, HOUR_AGO, 85)
    answer(slurm, "sacct", print_rows(first))
    strangers = queued("3", "RUNNING", "/elsewhere/job.sh")
    answer(slurm, "squeue", print_rows(queued("2", "PENDING", script), strangers))
    (row,) = [each for each in msgspec.json.decode(ok("ps", "--json").out) if each["run_dir"] == job.run_dir]
    assert (row["record"]["job_id"], row["record"]["state"]) == ("1", "PENDING")
    assert "PENDING" in ok("show", "1").out
    assert "has not ended after" in within("wait", "1", "--timeout", "1s").err
    assert ok("cancel", "1").code == 0
    assert (slurm / "scancel.asked").read_text() == "--quiet 2\n"

    answer(slurm, "squeue", ":")
    answer(slurm, "sacct", print_rows(first, accounted("2", "COMPLETED", HOUR_AGO, NOW - 60, 0)))
    assert within("wait", "1").code == 0


def test_two_jobs_of_one_script_are_not_linked_before_the_first_one_has_ended_an_attempt(
    job: Entry, slurm: Path
) -> None:
    """An sbatch whose answer was lost was repeated just now, and the second job is about to be cancelled."""
    script, folder = f"{job.run_dir}/job.sh", Path(job.run_dir)
    for name in ("state.json", "attempts.jsonl"):
        (folder / name).unlink()
    answer(slurm, "squeue", print_rows(queued("1", "RUNNING", script), queued("2", "PENDING", script)))
    assert ok("cancel", "1").code == 0
    assert (slurm / "scancel.asked").read_text() == "--quiet 1\n"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_later_job_of_the_script_is_not_linked_to_one_that_requeued_itself(
    job: Entry, slurm: Path, state: str
) -> None:
    """It is a copy, whose request came late, and leaves as it starts unless it continues the first one."""
    script, written = f"{job.run_dir}/job.sh", Path(job.run_dir, "state.json")
    if state == "RUNNING":
        written.write_text(json.dumps(json.loads(written.read_text()) | {"started": NOW - 60, "state": state}))
    answer(slurm, "squeue", print_rows(queued("1", state, script), queued("2", "PENDING", script)))
    assert ok("cancel", "1").code == 0
    assert (slurm / "scancel.asked").read_text() == "--quiet 1\n"
    assert not Path(job.run_dir, "control", "continued").exists()
