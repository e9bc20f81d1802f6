"""The command line as a process: exit codes, JSON, messages, and dry runs that touch nothing."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import pty
import shlex
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest
from commandline import Answer, hpcjobs, ok, start, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row
from waiting import eventually

from hpcjobs.errors import RequestError
from hpcjobs.job.plan import plan
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.submit import submit as submit_plan
from hpcjobs.scheduler.base import JobRecord, State

SITE = "{description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"


@pytest.fixture
def cluster(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands as recorded answers on PATH, and a site of that cluster; gives the folder of answers."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    answers = tmp_path / "slurm"
    answers.mkdir()
    answer(answers, "sbatch", "echo 42")
    row = queued_row(JobID=42, JobName="true", State="PENDING", Reason="Priority", Submit="$(date +%s)")
    answer(answers, "squeue", print_rows(row))
    answer(answers, "sacct", ":")
    answer(answers, "scancel", ":")
    monkeypatch.setenv("PATH", f"{answers}:{os.environ['PATH']}")
    return answers


def ended(cluster: Path, code: int, *, state: str | None = None) -> None:
    """Job 42 is over."""
    state = state or ("COMPLETED" if code == 0 else "FAILED")
    answer(cluster, "squeue", ":")
    now = int(time.time())
    row = accounted_row(JobID=42, JobName="true", State=state, Submit=now, End=now + 2, ExitCode=f"{code}:0")
    answer(cluster, "sacct", print_rows(row))


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_a_submission_tells_id_folder_and_the_next_command(cluster: Path, here: Path) -> None:
    printed_lines = ok("submit", "-N", "2", "true").out.splitlines()
    (run_dir,) = (here / "runs").glob("true-*")
    assert printed_lines == ["job 42  true on site mine", f"run folder {run_dir}", "next: hpcjobs logs -f 42"]
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["command_line"].endswith("submit -N 2 true")
    assert (here / "runs" / ".gitignore").read_text() == "*\n"


def test_options_of_the_command_sbatch_in_a_script_act_as_on_the_command_line(cluster: Path, here: Path) -> None:
    script = here / "job.sbatch"

    def submit(*options: str) -> Answer:
        script.write_text("#!/bin/sh\n#SBATCH -J true\n" + "".join(f"#SBATCH {option}\n" for option in options))
        return within("submit", "./job.sbatch")

    assert submit("--parsable").out == "42\n"
    ended(cluster, 3)
    assert submit("--wait").code == 3
    (cluster / "sbatch.asked").unlink()
    assert "42" not in submit("--test-only").out
    assert "--test-only" in (cluster / "sbatch.asked").read_text()
    assert "--parsable" not in (cluster / "sbatch.asked").read_text()
    with pytest.raises(RequestError, match=r"--test-only \(job.sbatch:3\)"):
        submit_plan(plan(["./job.sbatch"]))


def test_a_full_cache_folder_stops_no_submission(cluster: Path, tmp_path: Path) -> None:
    """No file may grow, as on a full disk; a dry run writes files of the cache alone."""
    command = shlex.join([sys.executable, "-m", "hpcjobs", "submit", "--dry-run", "true"])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", f"ulimit -f 0; {command}"], capture_output=True, text=True, env=environment)
    assert (done.returncode, "#SBATCH --job-name=true" in done.stdout) == (0, True), done.stderr


SALLOC = """
env >"${0%/*}/salloc.env"
while [ "$1" != bash ]; do shift; done
SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1 SLURM_MPI_TYPE=none exec "$@"
"""
"""Gives the nodes at once, and starts what `srun --mpi=none` would start there."""


def test_an_allocation_has_the_settings_of_salloc_and_not_those_of_sbatch(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(cluster, "salloc", SALLOC)
    for variable, value in (("SALLOC_ACCOUNT", "mine"), ("SALLOC_QOS", "debug"), ("SBATCH_ACCOUNT", "other")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("SALLOC_NO_BELL", "1")
    assert hpcjobs("alloc", "--qos", "long", "true").code == 0
    sent = (cluster / "salloc.asked").read_text()
    assert ("--account=mine" in sent, "--qos=long" in sent, "other" in sent) == (True, True, False)
    left = [line for line in (cluster / "salloc.env").read_text().splitlines() if line.startswith("SALLOC")]
    assert left == ["SALLOC_NO_BELL=1"]


@pytest.mark.parametrize("chosen", [None, "pmi2"])
def test_an_srun_in_an_allocation_has_the_mpi_of_the_cluster_or_of_the_user(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    answer(cluster, "salloc", SALLOC)
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("SLURM_MPI_TYPE", chosen)
    printed = hpcjobs("alloc", "bash", "-c", "echo mpi=${SLURM_MPI_TYPE-unset}").out
    assert printed.split() == [f"mpi={chosen or 'unset'}"]


def test_an_allocation_leaves_its_run_folder_only_where_something_was_written_there(cluster: Path, here: Path) -> None:
    answer(cluster, "salloc", "echo 'salloc: error: Job submit/allocate failed: Invalid qos' >&2; exit 1")
    assert hpcjobs("alloc", "true").code == 1
    answer(cluster, "salloc", SALLOC)
    assert hpcjobs("alloc", "bash", "-c", "exit 3").code == 3
    assert not list((here / "runs").glob("alloc-*"))
    assert hpcjobs("alloc", "bash", "-c", 'echo 1 >"$HPCJOBS_RUN_DIR/metrics.jsonl"').code == 0
    (run_dir,) = (here / "runs").glob("alloc-*")
    assert (run_dir / "metrics.jsonl").read_text() == "1\n"


def test_a_dry_run_prints_what_would_be_sent_and_touches_nothing(cluster: Path, here: Path, tmp_path: Path) -> None:
    """All but where the log goes and who makes the run folder, so that sbatch alone can have it."""
    before = tree(here), tree(Path.home() / ".local")
    dry = ok("submit", "--dry-run", "-N", "2", "--name", "same", "true")
    assert (tree(here), tree(Path.home() / ".local")) == before
    assert not (cluster / "sbatch.asked").exists()
    ok("submit", "-N", "2", "--name", "same", "true")
    (run_dir,) = (here / "runs").glob("same-*")

    def general(text: str, name: str) -> list[str]:
        own = (
            "# made by",
            "# by hand",
            "#SBATCH --output",
            "mkdir -p -m 700 ",
            "# Below the end",
            "HPCJOBS_SHELL=",
            "_hj_shell=",
        )
        text = text.partition("\n\n# shellcheck disable=all\n#==> ")[0]
        return [line.replace(name, "RUN") for line in text.splitlines() if not line.startswith(own)]

    planned = next(part for part in dry.err.split() if "/runs/same-" in part)
    assert general(dry.out, planned) == general((run_dir / "job.sh").read_text(), str(run_dir))
    assert (cluster / "sbatch.asked").read_text().split() == ["--parsable", f"{run_dir}/job.sh"]


def test_the_script_of_a_dry_run_says_how_it_is_sent_by_hand_and_makes_its_run_folder(cluster: Path) -> None:
    lines = ok("submit", "--dry-run", "true").out.splitlines()
    assert "# by hand: sbatch FILE, in a folder that all nodes see; the log is %x_%j.out there" in lines
    assert "#SBATCH --output=%x_%j.out" in lines
    assert any(line.startswith("mkdir -p -m 700 -- ") for line in lines)
    assert "#SBATCH --output=%x_%A_%a.out" in ok("submit", "--dry-run", "--json", "-a", "0-1", "true").json["script"]


@pytest.mark.parametrize(("flags", "file"), [(("--retries", "on"), "node.pyz"), (("--snapshot",), "code")])
def test_the_script_of_a_dry_run_that_needs_files_of_hpcjobs_says_so_at_once(
    cluster: Path, here: Path, flags: tuple[str, ...], file: str
) -> None:
    (here / "job.sh").write_text(ok("submit", "--dry-run", *flags, "true").out)
    done = subprocess.run(["bash", "job.sh"], cwd=here, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"has no {file}, which hpcjobs submit puts there: submit this job with hpcjobs" in done.stderr


def test_options_after_the_program_belong_to_it(cluster: Path) -> None:
    plan = ok("submit", "--dry-run", "--json", "echo", "-N", "9", "--help", "--", "-x").json
    assert plan["job"]["argv"] == ["echo", "-N", "9", "--help", "--", "-x"]
    assert plan["job"]["nodes"] == 1


def test_every_sbatch_option_is_reached_by_o(cluster: Path) -> None:
    arguments = (
        "-o",
        "comment=123",
        "-o",
        "nice=-5",
        "-o",
        "exclusive",
        "-o",
        "mail-type=END",
        "-o",
        "mem=0",
        "-o",
        "time=",
    )
    script = ok("submit", "--dry-run", *arguments, "true").out
    for line in ("--comment=123", "--nice=-5", "--exclusive", "--mail-type=END", "--mem=0"):
        assert f"\n#SBATCH {line}\n" in script
    assert "--time" not in script


def test_env_passes_a_variable_on_or_sets_it(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "from here")
    plan = ok("submit", "--dry-run", "--json", "--env", "TOKEN", "--env", "A=b=c", "--env", "EMPTY=", "true").json
    assert plan["job"]["env"] == {"TOKEN": "from here", "A": "b=c", "EMPTY": ""}


def test_explain_tells_where_each_value_was_read(cluster: Path, here: Path) -> None:
    (here / "job.yaml").write_text("program: ['true']\nresources: {nodes: 2}\n")
    document = ok("submit", "--explain", "--json", "--spec", "job.yaml", "-t", "2h").json
    sources = {row["name"]: (row["value"], row["source"]) for row in document}
    assert sources["nodes"] == ("2", "job.yaml")
    assert sources["time"] == ("02:00:00", "flag")
    assert not (here / "runs").exists()
    assert "job.yaml" in ok("submit", "--explain", "--spec", "job.yaml").out


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["submit", "--json", "true"], {"job_id", "cluster", "site", "run_dir", "name"}),
        (["submit", "--dry-run", "--json", "true"], {"job", "script", "run_dir", "command", "made_by"}),
        (["submit", "--dry-run", "--explain", "--json", "true"], {"job", "script", "run_dir", "command", "made_by"}),
        (["show", "--json", "42"], {"entry", "records", "first_failure", "program", "settings", "code", "results"}),
        (["logs", "--json", "42"], {"job_id", "files", "lines"}),
        (["cancel", "--json", "42"], {"cancelled"}),
        (["sites", "show", "mine", "--json"], {"name", "path", "partitions", "defaults", "gpu_request"}),
    ],
)
def test_json_is_one_object_with_its_documented_keys(cluster: Path, arguments: list[str], keys: set[str]) -> None:
    ok("submit", "true")
    document = ok(*arguments).json
    assert keys <= set(document)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["ps", "--json"], {"record", "name", "site", "run_dir"}),
        (["sites", "--json"], {"name", "path", "shadowed", "description"}),
        (["wait", "--json", "42"], {"job_id", "state", "source", "exit_code", "elapsed_s"}),
    ],
)
def test_json_of_many_is_one_list(cluster: Path, arguments: list[str], keys: set[str]) -> None:
    ok("submit", "true")
    if arguments[0] == "wait":
        ended(cluster, 0)
    document = ok(*arguments).json
    assert document
    assert all(keys == set(row) or keys <= set(row) for row in document)


def test_ps_tells_reason_and_folder_in_one_table(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    (cluster / "squeue.asked").unlink(missing_ok=True)
    output = ok("ps").out
    assert output.count("JOB ") == 1
    assert output.count("Priority") == 1
    assert "PENDING" in output
    assert len((cluster / "squeue.asked").read_text().splitlines()) == 1


def test_an_error_of_a_whole_process_is_one_message_and_a_code(cluster: Path) -> None:
    answered = hpcjobs("submit", "-N", "3", "true")
    assert (answered.code, answered.out, answered.err.count("hpcjobs: ")) == (5, "", 1)
    assert "Traceback" not in answered.err
    assert hpcjobs("submit", "--nodse", "2", "true").code == 2


@pytest.mark.parametrize("code", [0, 7])
def test_waiting_ends_with_the_jobs_own_exit_code(cluster: Path, code: int) -> None:
    ok("submit", "true")
    ended(cluster, code)
    answered = within("wait", "42")
    assert answered.code == code
    assert ("exit code 7" in answered.err) == (code == 7)
    assert within("submit", "--wait", "true").code == code


def test_a_cancelled_job_is_not_reported_with_exit_code_0(cluster: Path) -> None:
    ok("submit", "true")
    ended(cluster, 0, state="CANCELLED")
    answered = within("wait", "42")
    assert answered.code == 143
    assert "job 42 CANCELLED on n1\n" in answered.err
    assert "exit code" not in answered.err


def test_an_interrupted_wait_ends_with_130_and_no_traceback(cluster: Path) -> None:
    ok("submit", "true")
    (cluster / "squeue.asked").unlink(missing_ok=True)
    process = start("wait", "42")
    end = time.monotonic() + 240
    while not (cluster / "squeue.asked").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["submit", "--nodse", "2", "true"], 2, "--nodes"),
        (["submit", "-N", "two", "true"], 5, "two"),
        (["submti"], 2, "did you mean 'submit'?"),
        (["submit", "--env", "NOT_SET_HERE", "true"], 2, "write NOT_SET_HERE=VALUE"),
        (["submit", "--site", "min", "true"], 4, "did you mean 'mine'?"),
        (["submit", "--site", "MINE", "true"], 4, "did you mean 'mine'?"),
        (["submit", "--spec", "gone.yaml", "true"], 4, "/gone.yaml does not exist"),
        (["submit", "--spec", "", "true"], 4, "is a folder, not a file"),
        (["sweep", "--sweep", "gone.yaml", "true"], 4, "/gone.yaml does not exist"),
        (["submit", "--site", "", "true"], 2, "'--site' / '-s': the name is empty"),
        (["ps", "--site", ""], 2, "'--site' / '-s': the name is empty"),
        (["submit", "--template", "", "true"], 5, "--template: its value is empty"),
        (["submit", "--chdir", "", "true"], 5, "--chdir: its value is empty"),
        (["submit", "--ntasks-per-core", "-7", "true"], 5, "ntasks_per_core must be positive"),
        (["submit", "--after-any", "nobody", "true"], 6, "--after-any nobody: no job named 'nobody'"),
        (["submit", "-N", "3", "true"], 5, "nodes=3 (flag): partition main allows 2"),
        (["submit", "-o", "nodse=3", "true"], 5, "did you mean 'nodes'?"),
        (["submit", "-t", "9x", "true"], 5, "time: '9x' is not a time"),
        (["submit", "-t", "0", "true"], 5, "time: sbatch reads '0' as no limit; write UNLIMITED"),
        (["submit", "-t", "0-00:00", "true"], 5, "time: sbatch reads '0-00:00' as no limit; write UNLIMITED"),
        (["submit", "--open-mode", "apend", "true"], 5, "hint: use append or truncate"),
        (["submit"], 5, "no program to run"),
        (["submit", "--chdir", "gone", "true"], 5, "no such folder"),
        (["submit", "--after", "41", "true"], 6, "no job 41"),
        (["show", "41"], 6, "no job 41"),
        (["cancel", "nobody"], 6, "no job named 'nobody'"),
        (["logs"], 6, "hpcjobs submit starts one"),
    ],
)
def test_a_mistake_ends_with_its_code_and_one_message(
    cluster: Path, here: Path, arguments: list[str], code: int, message: str
) -> None:
    answered = within(*arguments)
    assert answered.code == code, answered
    assert message in answered.err
    assert "Traceback" not in answered.err
    assert answered.out == ""
    assert not (here / "runs").exists()


def test_what_slurm_refuses_is_quoted_and_leaves_no_run_folder(cluster: Path, here: Path) -> None:
    answer(cluster, "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    answered = within("submit", "true")
    assert answered.code == 7
    assert "sbatch refused (exit code 1): sbatch: error: Batch job submission failed: Invalid qos" in answered.err
    assert list((here / "runs").glob("true-*")) == []


def test_a_signal_goes_to_jobs_of_the_state_that_is_named_alone(cluster: Path) -> None:
    ok("submit", "true")
    assert ok("cancel", "--all", "--state", "RUNNING", "--signal", "USR1").out == "USR1 sent to no job\n"
    assert not (cluster / "scancel.asked").exists()
    assert ok("cancel", "--all", "--state", "PENDING", "--signal", "USR1").out == "USR1 sent to 42\n"


def test_a_signal_to_all_jobs_leaves_out_those_that_have_ended(cluster: Path) -> None:
    ok("submit", "true")
    ended(cluster, 0)
    assert ok("cancel", "--all", "--signal", "USR1").out == "USR1 sent to no job\n"
    assert "job 42 has ended: COMPLETED" in within("cancel", "--signal", "USR1", "42").err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["hold"], "`hpcjobs cancel` ends a job"),
        (["release"], "they start as soon as their CPUs and GPUs are free"),
        (["requeue"], "`hpcjobs rerun JOB` submits the job again"),
        (["update"], "`hpcjobs rerun JOB` with other options"),
    ],
)
def test_a_verb_that_only_slurm_has_names_what_a_job_of_this_machine_has(
    here: Path, arguments: list[str], hint: str
) -> None:
    job = ok("submit", "--site", "local", "--parsable", "sleep", "600").out.strip()
    refused = within(*arguments, job, *(["time=2h"] if arguments == ["update"] else []))
    ok("cancel", job)
    assert refused.code == 5
    assert f"{arguments[0]} {job}: jobs of this machine's own queue have no {arguments[0]}\nhint: " in refused.err
    assert hint in refused.err


def test_an_end_is_printed_once_with_its_exit_code(cluster: Path) -> None:
    ok("submit", "true")
    ended(cluster, 3)
    waited = within("wait", "42").err
    assert waited.count("FAILED") == waited.count("exit code 3") == 1, waited


def test_cancel_tells_which_jobs_had_ended_before(cluster: Path) -> None:
    ok("submit", "true")
    assert ok("cancel", "42").out == "cancelled 42\n"
    ended(cluster, 3)
    assert ok("cancel", "42").out == "job 42 had ended before: FAILED\n"
    assert ok("cancel", "42", "--json").json == {"cancelled": [], "ended": {"42": "FAILED"}, "unknown": []}
    assert (cluster / "scancel.asked").read_text() == "--quiet 42\n"


def test_a_job_that_was_cancelled_while_it_waited_stays_cancelled_where_slurmctld_alone_knew_it(cluster: Path) -> None:
    """Without accounting, and slurmctld forgets it soon after."""
    ok("submit", "true")
    answer(cluster, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    record = "JobId=42 JobName=true JobState=CANCELLED ExitCode=0:0 RunTime=00:00:00 SubmitTime=$now EndTime=$now"
    shown = f'echo "{record}"'.replace("$now", "$(date +%s)")
    answer(cluster, "scontrol", f'case "$*" in *"show job"*) {shown} ;; esac')
    answer(cluster, "scancel", f"printf '#!/bin/sh\n' > {cluster}/squeue")
    assert ok("cancel", "42").out == "cancelled 42\n"
    answer(cluster, "scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    (row,) = ok("ps", "--json").json
    assert row["record"]["state"] == "CANCELLED"
    assert "job 42 CANCELLED" in within("wait", "42").err


def test_a_report_without_accounting_has_the_user_and_the_jobs_of_hidden_partitions(cluster: Path) -> None:
    answer(cluster, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    answer(cluster, "squeue", ":")
    record = "JobId=77 JobName=plain UserId=eve(1234) JobState=RUNNING RunTime=00:01:00 SubmitTime=$now StartTime=$now"
    shown = f'echo "{record} Partition=secret"'.replace("$now", "$(date +%s)")
    answer(cluster, "scontrol", f'case "$*" in *--all*"show job"*) {shown} ;; esac')
    report = ok("report", "jobs", "-a").out
    assert "77" in report
    assert "eve" in report


def test_a_report_on_a_cluster_without_a_site_file_is_of_the_cluster_that_is_here(
    cluster: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCJOBS_SITE")
    (here / "site_configs" / "mine.yaml").unlink()
    answer(cluster, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    answer(cluster, "squeue", ":")
    record = (
        f"JobId=77 JobName=plain UserId={getpass.getuser()}(1) JobState=RUNNING RunTime=00:01:00 StartTime=$(date +%s)"
    )
    shows = f'*"show job"*) echo "{record} SubmitTime=$(date +%s)" ;; *"show config"*) echo "ClusterName = deep" ;;'
    answer(cluster, "scontrol", f'case "$*" in {shows} esac')
    assert "no site is named" in within("submit", "true").err, "this is a login node of an unknown site"
    assert "77" in ok("report", "jobs").out
    assert ok("report", "jobs", "--json").json[0]["site"] == "deep"
    assert ok("report", "jobs", "--by", "user", "--json").json[0]["jobs"] == 1
    ok("report", "jobs", "--page", "page")
    assert "Jobs on deep" in (here / "page" / "index.html").read_text()
    assert "the accounting of site deep has no job 78" in within("report", "jobs", "78").err


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 3)])
def test_a_job_that_ended_while_slurmctld_was_away_met_no_time_limit_whatever_the_accounting_has(
    cluster: Path, state: str, code: int
) -> None:
    run_dir = Path(ok("submit", "--json", "true").json["run_dir"])
    now = int(time.time())
    end = {"job_id": "42", "state": state, "exit_code": code, "nodes": "n1"}
    (run_dir / "state.json").write_text(json.dumps(end | {"started": now - 900, "ended": now - 870}))
    times = {"Submit": now, "Start": now - 900, "End": now - 100, "ElapsedRaw": 800}
    answer(cluster, "sacct", print_rows(accounted_row(JobID=42, JobName="true", State="TIMEOUT", **times)))
    answer(cluster, "squeue", ":")
    waited = within("wait", "42")
    assert (waited.code, f"job 42 {state}" in waited.err) == (code, True)
    assert state in within("why", "42").out.splitlines()[0]
    assert "Slurm has TIMEOUT: it did not hear of the end" in ok("ps", "-a", "--json").out


def test_waiting_for_a_job_that_met_its_time_limit_never_says_that_it_was_cancelled(cluster: Path) -> None:
    run_dir = Path(ok("submit", "--json", "true").json["run_dir"])
    now = int(time.time())
    end = {"job_id": "42", "state": "CANCELLED", "exit_code": 143, "nodes": "n1"}  # all that the job knows of a SIGTERM
    (run_dir / "state.json").write_text(json.dumps(end | {"started": now - 70, "ended": now}))
    times = {"Submit": now - 70, "End": now, "ElapsedRaw": 70}
    answer(cluster, "sacct", print_rows(accounted_row(JobID=42, JobName="true", State="TIMEOUT", **times)))
    answer(cluster, "squeue", ":")
    answered = within("wait", "42")
    assert answered.code != 0
    assert "job 42 TIMEOUT on n1\n" in answered.err
    assert "CANCELLED" not in answered.err


def test_cancel_does_not_claim_to_have_cancelled_what_the_scheduler_does_not_know(cluster: Path) -> None:
    ok("submit", "true")
    answer(cluster, "squeue", ":")
    answer(cluster, "scontrol", ":")
    answered = within("cancel", "42")
    assert (answered.code, answered.out) == (6, "")
    assert "the scheduler does not know job 42" in answered.err


def test_without_slurm_the_missing_command_is_named(here: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    answered = within("submit", "true")
    assert answered.code == 9
    assert "sbatch: not found on PATH" in answered.err


def test_after_names_a_job_or_a_task_of_an_array_of_the_same_site(cluster: Path) -> None:
    index.add(Entry(job_id="7", name="a", site="mine", scheduler="slurm", run_dir="/r", submitted=1.0, array="0-3"))
    index.add(Entry(job_id="8", name="b", site="other", scheduler="slurm", run_dir="/r", submitted=2.0))
    script = ok("submit", "--dry-run", "--after", "7", "--after", "7_2", "true").out
    assert "#SBATCH --dependency=afterok:7:7_2\n" in script
    assert within("submit", "--dry-run", "--after", "8", "true").code == 6


def test_words_that_are_not_utf8_are_refused_by_name(cluster: Path) -> None:
    answered = within("submit", "echo", b"\xff".decode("utf-8", "surrogateescape"))
    assert answered.code == 5
    assert "is not UTF-8 text" in answered.err


def test_logs_choose_a_rank_and_say_when_there_is_nothing_yet(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    assert "has printed nothing yet" in within("logs").err
    (run_dir,) = (here / "runs").glob("true-*")
    (run_dir / "logs" / "true_42.out").write_text("0: one\n 1: two\n1:\n10: ten: 1: x\nplain\n")
    assert ok("logs", "--rank", "1").out == "two\n\n"
    assert ok("logs", "--rank", "10", "42").out == "ten: 1: x\n"
    assert ok("logs", "42").out.endswith("plain\n")


def test_an_array_of_which_tasks_wait_has_printed_nothing_yet(cluster: Path, here: Path) -> None:
    ok("submit", "--array", "0-1", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    end = JobRecord("42_0", State.CANCELLED, "nobody", ended=1.0)
    (run_dir / "accounting.json").write_bytes(msgspec.json.encode([end]))
    assert "has printed nothing yet" in ok("logs").err


def test_a_job_that_ended_without_output_printed_nothing(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    state = {"job_id": "42", "state": "COMPLETED", "exit_code": 0, "started": 1, "ended": 2, "nodes": "n1"}
    (run_dir / "state.json").write_text(json.dumps(state))
    answer(cluster, "squeue", ":")
    answer(cluster, "sacct", ":")
    assert "job 42 printed nothing (" in ok("logs").err


def test_show_prints_a_broken_site_beside_the_others(here: Path) -> None:
    (here / "site_configs").mkdir()
    (here / "site_configs" / "bad.yaml").write_text("partition: {}\n")
    output = ok("sites").out
    assert "broken: " in output
    assert "tu-hpc" in output


def test_the_settings_a_site_shows_are_a_site_file_again(here: Path) -> None:
    shown = ok("sites", "show", "tu-hpc").out
    assert shown.startswith("# ")
    (here / "again.yaml").write_text(
        "".join(line + "\n" for line in shown.splitlines() if not line.startswith(("name:", "path:", "rehearsal:")))
    )
    again = ok("sites", "show", "./again.yaml", "--json").json
    first = ok("sites", "show", "tu-hpc", "--json").json
    assert {**again, "name": "", "path": ""} == {**first, "name": "", "path": ""}


def test_help_and_version_of_every_verb_are_printed() -> None:
    output = ok("--help").out
    for verb in ("submit", "ps", "show", "logs", "wait", "cancel", "sites", "sandbox"):
        assert verb in output
        assert "Usage" in ok(verb, "--help").out
    assert ok("--version").out.startswith("hpcjobs ")


def test_a_closed_pipe_is_no_error(cluster: Path, here: Path) -> None:
    ok("submit", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    (run_dir / "logs" / "true_42.out").write_text("line\n" * 100_000)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m hpcjobs logs 42 | head -n 1"],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("line\n", "")


@pytest.mark.parametrize(
    "arguments", [("submit", "-h"), ("help", "submit"), ("sweep", "run", "-h"), ("help", "sweep", "run")]
)
def test_help_is_found_however_it_is_asked_for(arguments: tuple[str, ...]) -> None:
    assert "--constraint" in ok(*arguments).out


def test_help_alone_and_the_version_have_short_forms() -> None:
    assert ok("help").out == ok("-h").out == ok("--help").out
    assert ok("-V").out == ok("--version").out
    answer = within("help", "submitt")
    assert answer.code == 2
    assert "did you mean 'submit'" in answer.err


def test_a_word_after_the_program_is_the_programs_also_where_it_looks_like_help() -> None:
    assert "-h" in ok("submit", "--site", "local", "--dry-run", "sh", "-h").out


def test_jobs_are_listed_by_state_name_age_and_number() -> None:
    for name in ("first", "second", "second"):
        ok("submit", "--site", "local", "--name", name, "--wait", "true")
    within("submit", "--site", "local", "--name", "third", "--wait", "false")

    def names(*arguments: str) -> list[str]:
        return [row["name"] for row in ok("ps", "--json", *arguments).json]

    assert names("--name", "second") == ["second", "second"]
    assert names("--state", "failed") == ["third"]
    assert names("--state", "COMPLETED,FAILED", "-n", "2") == ["second", "third"]
    assert names("--since", "1h", "--state", "PENDING") == []
    assert "no such jobs" in ok("ps", "--name", "fourth").out
    answer = within("ps", "--state", "RUNING")
    assert answer.code == 5
    assert "did you mean 'RUNNING'" in answer.err
    assert "--since soon" in within("ps", "--since", "soon").err


def test_run_folders_are_left_out_on_a_terminal_unless_they_are_asked_for() -> None:
    run_dir = ok("submit", "--site", "local", "--wait", "--json", "true").json["run_dir"]
    assert run_dir in ok("ps").out
    for arguments, shown in (((), False), (("--wide",), True)):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        with subprocess.Popen(
            [sys.executable, "-m", "hpcjobs", "ps", *arguments], stdout=slave, stdin=slave
        ) as process:
            os.close(slave)
            seen = read_all(master)
        assert process.returncode == 0
        assert ("RUN FOLDER" in " ".join(seen.split())) == shown
        assert "COMPLETED" in seen


def read_all(terminal: int) -> str:
    seen = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while data := os.read(terminal, 4096):
            seen += data
    return seen.decode()


def test_all_jobs_or_those_in_a_state_are_cancelled_at_once() -> None:
    running = ok("submit", "--site", "local", "--json", "sleep", "600").json["job_id"]
    eventually(lambda: ok("ps", "--json", "--state", "RUNNING").json)
    assert within("cancel").code == 2
    assert within("cancel", running, "--all").code == 2
    assert ok("cancel", "--all", "--state", "PENDING").out == "nothing to cancel\n"
    assert ok("cancel", "--all").out == f"cancelled {running}\n"
    ok("ps")
    assert within("wait", running).code != 0
    assert ok("cancel", "--all").out == "nothing to cancel\n"


def test_python_m_takes_no_module_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("typer", "array", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')\n")
    done = subprocess.run([sys.executable, "-m", "hpcjobs", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
