"""A cluster that lost its state gives out job 1 again: no verb takes one of the two jobs for the other."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row

from hpcjobs.diagnosis.gather import _TABLE
from hpcjobs.files import user_name
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.status import by_job, is_ours
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.outputs import _SUBMISSION
from hpcjobs.scheduler.slurm.parse import ACCOUNTED, ACCOUNTED_BEFORE_20_11, parse_scontrol, read_shown

NOW = int(time.time())
SITE = "{cluster: c, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster whose job 1, of plain sbatch, runs since a minute."""
    commands = tmp_path / "slurm"
    commands.mkdir()
    own = {"JobID": 1, "JobName": "later", "NodeList": "n9", "Command": f"{here}/later.sh"}
    row = queued_row(**own, Submit=NOW - 60, Elapsed="1:00")
    shown = (
        f"JobId=1 JobName=later UserId={user_name()}({os.getuid()}) GroupId=x(1) JobState=RUNNING Reason=None"
        f" ExitCode=0:0 SubmitTime={NOW - 60} StartTime={NOW - 60} TimeLimit=01:00:00 NodeList=n9 NumNodes=1"
        f" Command={here}/later.sh StdOut={here}/later.out"
    )
    answer(commands, "squeue", print_rows(row))
    answer(commands, "scontrol", f"case $* in *'show job'*) echo '{shown}';; *) echo ClusterName = c;; esac")
    answer(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    answer(commands, "scancel", ":")
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    (here / "later.out").write_text("line of the later job\n")
    return commands


@pytest.fixture
def earlier(here: Path) -> Entry:
    """The earlier job 1, of hpcjobs, which failed."""
    folder = here / "runs" / "earlier"
    (folder / "logs").mkdir(parents=True)
    entry = Entry("1", "earlier", "mine", "slurm", str(folder), NOW - 9000.0, "c", user=user_name())
    state = {"job_id": "1", "state": "FAILED", "exit_code": 3, "started": NOW - 8990, "ended": NOW - 8000}
    (folder / "state.json").write_text(json.dumps(state | {"nodes": "n1"}))
    job = {"resources": {}, "nodes": 1, "ntasks_per_node": 1}
    (folder / "manifest.json").write_text(json.dumps({"user": user_name(), "job": job}))
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    return entry


def test_the_id_means_the_later_job_in_every_verb_while_that_is_in_the_queue(slurm: Path, earlier: Entry) -> None:
    assert '"RUNNING"' in ok("show", "1", "--json").out
    assert ok("why", "1").out == "job 1 RUNNING: it has not failed\n"
    assert ok("logs", "1").out == "line of the later job\n"
    assert "job 1 has not ended" in within("wait", "1", "--timeout", "1").err
    rows = json.loads(ok("ps", "-a", "--json").out)
    assert [(row["name"], row["record"]["state"]) for row in rows] == [("earlier", "FAILED"), ("later", "RUNNING")]
    ok("update", "1", "time=2h")
    assert "update JobId=1 TimeLimit=02:00:00" in (slurm / "scontrol.asked").read_text()
    ok("cancel", "1")
    assert (slurm / "scancel.asked").read_text() == "--quiet 1\n"


def test_the_run_folder_means_the_earlier_job_which_ended(slurm: Path, earlier: Entry) -> None:
    folder = earlier.run_dir
    assert '"FAILED"' in ok("show", folder, "--json").out
    assert '"n9"' not in within("why", folder, "--json").out
    assert within("wait", folder).code == 3
    assert "has ended: FAILED" in within("update", folder, "time=2h").err
    assert "had ended before: FAILED" in ok("cancel", folder).out
    assert not (slurm / "scancel.asked").exists()


def account(slurm: Path, script: str | None, *, submitted: int, name: str = "earlier") -> None:
    """Of job 1 the queue knows nothing, and sacct that it completed; ``script`` None: it keeps no commands."""
    table, line = (ACCOUNTED, {"SubmitLine": f"sbatch --parsable {script}"}) if script else (ACCOUNTED_BEFORE_20_11, {})
    times = {"Submit": submitted, "Start": submitted + 1, "End": submitted + 2, "ElapsedRaw": 1}
    row = accounted_row(table, JobID=1, JobName=name, NodeList="n9", **times, **line)
    refusal = "echo 'sacct: fatal: Invalid field requested: \"SubmitLine\"' >&2; exit 1"
    answer(slurm, "squeue", ":")
    answer(slurm, "sacct", f"case $* in *{','.join(table.columns)}*) {print_rows(row)} ;; *) {refusal} ;; esac")


def test_a_job_that_the_controller_forgot_is_not_shown_with_the_end_of_the_job_that_got_its_id(
    slurm: Path, earlier: Entry
) -> None:
    """Both have one name and user, and were submitted within a minute."""
    os.unlink(f"{earlier.run_dir}/state.json")  # it never began
    account(slurm, f"{earlier.run_dir}-2/job.sh", submitted=int(earlier.submitted) + 50)
    (row,) = [row for row in json.loads(ok("ps", "-a", "--json").out) if row["run_dir"] == earlier.run_dir]
    assert row["record"]["state"] == "UNKNOWN"
    assert within("wait", earlier.run_dir).code != 0


@pytest.mark.parametrize("script", ["{run_dir}/job.sh", "-D /scratch {run_dir}/job.sh", "/spool/copy-of-it", None])
def test_a_job_is_known_by_its_name_and_time_where_sacct_has_no_sure_script(
    slurm: Path, earlier: Entry, script: str | None
) -> None:
    os.unlink(f"{earlier.run_dir}/state.json")
    script = None if script is None else script.format(run_dir=earlier.run_dir)
    account(slurm, script, submitted=int(earlier.submitted) + 1)
    assert '"COMPLETED"' in ok("show", earlier.run_dir, "--json").out


def test_without_an_accounting_a_report_has_both_jobs(slurm: Path, earlier: Entry) -> None:
    rows = json.loads(ok("report", "jobs", "--json").out)
    assert sorted((row["name"], row["state"], row["run_dir"]) for row in rows) == [
        ("earlier", "FAILED", earlier.run_dir),
        ("later", "RUNNING", None),
    ]


@pytest.mark.parametrize("name", ["x UserId=me(1000)", "train Command=/me/job.sh", "x\nJobId=1 UserId=me(1000)"])
def test_no_name_of_a_job_says_whose_it_is(name: str) -> None:
    shown = f"JobId=7 JobName={name} UserId=eve(7) GroupId=x(7) JobState=RUNNING Command=/eve/x.sh"
    assert {(record.user, record.command) for record in parse_scontrol(shown)} <= {("eve", "/eve/x.sh")}


def test_the_name_of_a_heterogeneous_job_is_its_name_alone() -> None:
    """Slurm prints the set of the components between the name and the user."""
    record = "JobId=5 HetJobId=5 HetJobOffset=0 JobName=het.sh HetJobIdSet=5-6 UserId=me(1000) JobState=RUNNING"
    assert read_shown(record)["JobName"] == "het.sh"


def rows_of_job_5(form: str, *, submitted: int, name: str, state: str) -> list[dict[str, object]]:
    """sacct's rows of a plain job, an array (``_``) or a heterogeneous job (``+``) with the id 5."""
    times = {"Submit": submitted, "Start": submitted + 1, "End": submitted + 9, "ElapsedRaw": 8}
    code = "0:0" if state == "COMPLETED" else "3:0"
    own = {"JobName": name, "State": state, "ExitCode": code, **times}
    return [{"JobID": f"5{form}{n}" if form else 5, **own} for n in range(2 if form else 1)]


def account_both(slurm: Path, *rows: dict[str, object]) -> None:
    """The queue is empty, slurmctld has forgotten both jobs, and sacct has these rows."""
    tables = []
    for table in (ACCOUNTED, _TABLE):
        printed = print_rows(*(accounted_row(table, **row) for row in rows))
        tables.append(f"*{','.join(table.columns)}*) {printed} ;;")
    files = [f"{row['JobID']}|5|{row['JobName']}|{user_name()}|{slurm.parent}/{row['Submit']}|" for row in rows]
    tables.append(f"*JobIDRaw*) {print_rows(*files).replace('|', _SUBMISSION.separator)} ;;")
    answer(slurm, "squeue", ":")
    answer(slurm, "sacct", f"case $* in {' '.join(reversed(tables))} esac")
    answer(slurm, "scontrol", "case $* in *'show job'*) echo Invalid job id specified >&2; exit 1;; esac")


FORMS = [("_", ""), ("", "_"), ("+", ""), ("", "+"), ("_", "+"), ("+", "_")]


@pytest.mark.parametrize(("before", "now"), FORMS)
def test_an_id_means_the_later_of_a_plain_job_an_array_and_a_heterogeneous_job(
    slurm: Path, before: str, now: str
) -> None:
    old = rows_of_job_5(before, submitted=NOW - 9000, name="same", state="FAILED")
    account_both(slurm, *old, *rows_of_job_5(now, submitted=NOW - 600, name="same", state="COMPLETED"))
    states = [record["state"] for record in json.loads(ok("show", "5", "--json").out)["records"]]
    assert states == ["COMPLETED"] * (2 if now else 1)
    assert within("wait", "5").code == 0
    assert "it has not failed" in ok("why", "5").out
    assert "FAILED" not in ok("cancel", "5").out


@pytest.mark.parametrize(("before", "now"), FORMS)
def test_a_list_has_a_row_of_each_job_that_had_the_id(slurm: Path, before: str, now: str) -> None:
    old = rows_of_job_5(before, submitted=NOW - 9000, name="old", state="FAILED")
    account_both(slurm, *old, *rows_of_job_5(now, submitted=NOW - 600, name="new", state="COMPLETED"))
    lines = [line.split() for line in ok("ps", "-a").out.splitlines() if line.startswith("5")]
    jobs = [("old", "FAILED")] * (2 if before == "+" else 1) + [("new", "COMPLETED")] * (2 if now == "+" else 1)
    assert [tuple(cell for cell in line if cell in ("old", "new", "FAILED", "COMPLETED")) for line in lines] == jobs


def test_a_job_in_the_queue_is_not_mixed_with_the_tasks_of_an_array_that_had_its_id(slurm: Path) -> None:
    account_both(slurm, *rows_of_job_5("_", submitted=NOW - 9000, name="same", state="FAILED"))
    answer(slurm, "squeue", print_rows(queued_row(JobID=5, JobName="same", Submit=NOW - 60)))
    shown = f"JobId=5 JobName=same UserId={user_name()}({os.getuid()}) JobState=RUNNING SubmitTime={NOW - 60}"
    answer(slurm, "scontrol", f"echo '{shown}'")
    assert [record["state"] for record in json.loads(ok("show", "5", "--json").out)["records"]] == ["RUNNING"]
    assert ok("why", "5").out == "job 5 RUNNING: it has not failed\n"
    ok("cancel", "5")
    assert (slurm / "scancel.asked").read_text() == "--quiet 5\n"


@pytest.mark.parametrize(("array", "form"), [("0-1", ""), ("0-1", "+"), (None, "_"), (None, "+")])
def test_no_row_of_another_form_belongs_to_a_job_with_a_run_folder(
    slurm: Path, here: Path, array: str | None, form: str
) -> None:
    """Not even one of the same name, submitted within the same minutes."""
    (folder := here / "runs" / "own").mkdir(parents=True)
    index.add(Entry("5", "own", "mine", "slurm", str(folder), NOW - 900.0, "c", array=array, user=user_name()))
    own = rows_of_job_5("_" if array else "", submitted=NOW - 900, name="own", state="COMPLETED")
    other = rows_of_job_5(form, submitted=NOW - 800, name="own", state="FAILED")
    account_both(slurm, *other, *own)
    for name in ("5", str(folder)):
        states = [record["state"] for record in json.loads(ok("show", name, "--json").out)["records"]]
        assert states == ["COMPLETED"] * len(own)
        assert within("wait", name).code == 0
        assert "it has not failed" in ok("why", name).out


def test_the_last_task_of_an_array_belongs_to_it_under_the_bare_id_too() -> None:
    """sacct prints it so for a moment, with the time at which the array was submitted."""
    tasks = [JobRecord(job_id, State.COMPLETED, "sacct", submitted=10.0) for job_id in ("5", "5_0", "5_1", "6")]
    assert [[record.job_id for record in job] for job in by_job(tasks)] == [["5", "5_0", "5_1"], ["6"]]


def test_the_log_of_a_job_is_not_looked_for_by_a_task_of_the_array_that_had_its_id(slurm: Path) -> None:
    old = rows_of_job_5("_", submitted=NOW - 9000, name="same", state="FAILED")
    account_both(slurm, *old, *rows_of_job_5("", submitted=NOW - 600, name="same", state="FAILED"))
    folder = slurm.parent / str(NOW - 600)
    folder.mkdir()
    (folder / "slurm-5.out").write_text("ValueError: of the later job\n")
    assert ok("logs", "5").out == "ValueError: of the later job\n"
    assert "ValueError: of the later job" in ok("why", "5").out


def test_the_name_of_an_earlier_job_means_that_job_and_not_the_later_one_of_its_id(slurm: Path) -> None:
    old = rows_of_job_5("_", submitted=NOW - 9000, name="old", state="FAILED")
    account_both(slurm, *old, *rows_of_job_5("", submitted=NOW - 600, name="new", state="COMPLETED"))
    assert [record["state"] for record in json.loads(ok("show", "old", "--json").out)["records"]] == ["FAILED"] * 2
    assert ok("why", "old").out.startswith("job 5_0  old: FAILED\n")


def test_two_arrays_of_one_id_and_different_names_are_two_jobs(slurm: Path) -> None:
    old = rows_of_job_5("_", submitted=NOW - 9000, name="old", state="FAILED")
    rows = [{**row, "JobID": f"5_{n}"} for n, row in zip((2, 3), old, strict=True)]
    account_both(slurm, *rows, *rows_of_job_5("_", submitted=NOW - 600, name="new", state="COMPLETED"))
    lines = [line for line in ok("ps", "-a").out.splitlines() if line.startswith("5")]
    assert [("old" in line, "new" in line) for line in lines] == [(True, False), (False, True)]
    assert within("wait", "5").code == 0
    assert "it has not failed" in ok("why", "5").out


def test_a_task_of_an_earlier_array_can_be_named_though_a_later_job_has_the_id(slurm: Path) -> None:
    old = rows_of_job_5("_", submitted=NOW - 9000, name="old", state="FAILED")
    account_both(slurm, *old, *rows_of_job_5("", submitted=NOW - 600, name="new", state="COMPLETED"))
    assert "5_1: FAILED" in ok("show", "5_1").out
    assert within("wait", "5_1").code == 3


def test_a_job_that_ended_between_two_questions_has_failed(slurm: Path) -> None:
    account_both(slurm, *rows_of_job_5("", submitted=NOW - 600, name="x", state="FAILED"))
    shown = f"JobId=5 JobName=x UserId={user_name()}({os.getuid()}) JobState=RUNNING SubmitTime={NOW - 600}"
    answer(slurm, "scontrol", f"echo '{shown} StartTime={NOW - 599}'")
    assert "FAILED" in ok("why", "5").out


def test_an_array_whose_tasks_have_names_of_their_own_is_one_job(slurm: Path) -> None:
    """One task was requeued, which moved its submit time, and has ended; the others run."""
    own = {"Submit": NOW - 600, "Start": NOW - 590}
    running = [queued_row(JobID=f"5_{n}", JobName=f"fit{n}", **own) for n in (1, 2)]
    (ended,) = rows_of_job_5("", submitted=NOW - 300, name="fit0", state="COMPLETED")
    alive = [{"JobID": f"5_{n}", "JobName": f"fit{n}", "State": "RUNNING", "End": "Unknown", **own} for n in (1, 2)]
    account_both(slurm, {**ended, "JobID": "5_0"}, *alive)
    answer(slurm, "squeue", print_rows(*running))
    shown = {row["job_id"]: row["state"] for row in json.loads(ok("show", "5", "--json").out)["records"]}
    assert {shown["5_1"], shown["5_2"]} == {"RUNNING"}
    assert len([line for line in ok("ps").out.splitlines() if line.startswith("5")]) == 1
    assert within("cancel", "5").out == "cancelled 5\n"


def test_an_ended_job_without_a_name_is_found(slurm: Path) -> None:
    """slurmdbd calls it 'allocation', as a row that has no name yet."""
    account_both(slurm, *rows_of_job_5("", submitted=NOW - 600, name="allocation", state="FAILED"))
    assert "5: FAILED" in ok("show", "5").out
    assert within("wait", "5").code == 3


@pytest.mark.parametrize("name", ['it"s', " x", "x "])
def test_a_name_that_slurmdbd_keeps_in_other_characters_is_the_jobs(name: str) -> None:
    entry = Entry("5", name, "-", "slurm", "-/5", NOW - 60.0)
    stored = name.strip().replace('"', "`")
    assert is_ours(entry, JobRecord("5", State.COMPLETED, "sacct", name=stored, submitted=NOW - 50.0))
    assert not is_ours(entry, JobRecord("5", State.COMPLETED, "sacct", name="other", submitted=NOW - 50.0))


def test_a_task_whose_row_of_sacct_has_no_name_yet_is_known_by_its_slurm_job_id(slurm: Path) -> None:
    own = {"JobName": "fit", "Submit": NOW - 6, "Start": NOW - 5}
    placeholder = {"JobID": 6, "JobName": "allocation", "State": "PENDING", "Submit": NOW - 5, "End": "Unknown"}
    account_both(slurm, placeholder)
    answer(slurm, "squeue", print_rows(queued_row(JobID="5_0", **own)))
    shown = f"JobId=6 ArrayJobId=5 ArrayTaskId=0 JobName=fit UserId={user_name()}({os.getuid()}) JobState=RUNNING"
    answer(
        slurm, "scontrol", f"case $* in *'show job'*) echo '{shown} SubmitTime={NOW - 6} StartTime={NOW - 5}';; esac"
    )
    assert "5_0: RUNNING" in ok("show", "6").out
    assert ok("cancel", "6").out == "cancelled 5_0\n"


def test_a_component_that_failed_counts_while_the_accounting_has_it_as_running(slurm: Path) -> None:
    first, second = rows_of_job_5("+", submitted=NOW - 600, name="het", state="COMPLETED")
    account_both(slurm, first, {**second, "State": "RUNNING", "End": "Unknown"})
    own = f"JobName=het UserId={user_name()}({os.getuid()}) SubmitTime={NOW - 600} StartTime={NOW - 599}"
    shown = f"JobId=6 HetJobId=5 HetJobOffset=1 {own} EndTime={NOW - 9} JobState=FAILED ExitCode=3:0"
    answer(slurm, "scontrol", f"case $* in *'show job'*) echo '{shown}';; esac")
    assert "5+1: FAILED" in ok("show", "5").out
    assert within("wait", "5").code == 3
