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

from hpcjobs.files import user_name
from hpcjobs.run import index
from hpcjobs.run.index import Entry
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
