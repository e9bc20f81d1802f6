"""What the accounting adds to a diagnosis: rows that a real Slurm printed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from commandline import ok, within
from scripted_slurm import answer as answer_command

from hpcjobs.diagnosis.failed import diagnose
from hpcjobs.diagnosis.gather import _TABLE, failed_nodes, gather_foreign, read_account
from hpcjobs.diagnosis.values import Diagnosis
from hpcjobs.processes.programs import Result
from hpcjobs.scheduler.base import State

OVER_MEMORY = """\
1: slurmstepd-tu02: error: StepId=1.0 exceeded memory limit (326778880 > 134217728), being killed
slurmstepd-tu01: error: Exceeded job memory limit
0: slurmstepd-tu01: error: *** STEP 1.0 ON tu01 CANCELLED AT 2026-11-22T21:23:21 ***
srun: error: tu01: task 0: Killed
srun: error: tu02: task 1: Killed
"""


def row(**values: str) -> str:
    return _TABLE.separator.join(values.get(column, "") for column in _TABLE.columns)


class Slurm:
    """Answers of Slurm's commands by their first word; the others are not on this machine's cluster."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers

    def __call__(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        answer = self.answers.get(argv[0])
        return Result(1, "", "error") if answer is None else Result(0, answer, "")


def sacct(state: str = "FAILED", *, step_state: str = "CANCELLED by 0", rss: str = "319120K") -> str:
    job = row(JobID="1", JobName="t", State=state, ExitCode="9:0", NodeList="tu[01-02]", ReqMem="256M", Start="1000")
    batch = row(JobID="1.batch", State="FAILED", ExitCode="9:0", MaxRSS="13512K", MaxRSSNode="tu01", MaxRSSTask="0")
    step = row(JobID="1.0", State=step_state, ExitCode="0:9", MaxRSS=rss, MaxRSSNode="tu02", MaxRSSTask="1")
    return f"{job}\n{batch}\n{step}\n"


def explain(slurm: Slurm, log: Path | None = None) -> Diagnosis:
    subject = gather_foreign("1", log=log, runner=slurm)
    return diagnose(subject.facts, subject.lines)


def test_the_task_that_used_the_memory_is_named_and_not_the_one_that_srun_reports_first(tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    log.write_text(OVER_MEMORY)
    for answer in (explain(Slurm(sacct=sacct()), log), explain(Slurm(sacct=sacct(rss="")), log)):
        assert (answer.cause, answer.rank, answer.host) == ("out-of-memory", 1, "tu02")
    assert "sbatch --mem 256M SCRIPT" in explain(Slurm(sacct=sacct()), log).fix


def test_the_accounting_alone_shows_that_memory_was_exceeded() -> None:
    answer = explain(Slurm(sacct=sacct("OUT_OF_MEMORY", step_state="OUT_OF_MEMORY")))
    assert (answer.cause, answer.certain, answer.rank, answer.host) == ("out-of-memory", True, 1, "tu02")


def test_why_an_array_task_once_waited_is_not_evidence_of_its_failure() -> None:
    waited = row(JobID="1", JobName="t", State="FAILED", Reason="JobArrayTaskLimit", ExitCode="9:0", Start="1000")
    evidence = [each.text for each in explain(Slurm(sacct=f"{waited}\n")).evidence]
    assert evidence == ["state FAILED, exit code 9"]


def test_a_task_far_below_its_limit_that_was_killed_is_not_called_out_of_memory() -> None:
    answer = explain(Slurm(sacct=sacct(rss="20M").replace("9:0", "0:9")))
    assert (answer.cause, answer.certain) == ("killed", False)


def test_a_torchrun_jobs_task_is_no_rank(tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    log.write_text("torch.distributed.elastic.agent: starting\nsrun: error: tu02: task 1: Segmentation fault\n")
    answer = explain(Slurm(sacct=sacct(rss="20M")), log)
    assert (answer.rank, answer.host) == (None, "tu02")


def test_nodes_that_failed_are_known_from_the_accountings_events() -> None:
    slurm = Slurm(sacct=sacct("NODE_FAIL"), sacctmgr="tu02|DOWN*\n", sinfo="tu01 idle\ntu02 idle\n")
    answer = explain(slurm)
    assert (answer.cause, answer.host) == ("node-failed", "tu02")
    account = read_account("1", env={}, runner=slurm)
    assert account is not None
    assert account.state is State.NODE_FAIL
    assert failed_nodes(account, env={}, runner=Slurm(sinfo="tu01 idle\ntu02 drained*\n")) == ("tu02",)


def test_without_accounting_the_job_is_known_from_scontrol_with_the_log_it_names(tmp_path: Path) -> None:
    log = tmp_path / "of a job.out"
    log.write_text("ModuleNotFoundError: No module named 'x'\n")
    shown = (
        "JobId=1 JobName=t UserId=me(1) JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0 RunTime=00:00:03 "
        f"TimeLimit=00:10:00 NodeList=tu01 StartTime=1000 Command=/x/job.sh WorkDir={tmp_path} "
        f"StdErr={log} StdIn=/dev/null StdOut={log} Power=\n"
    )
    answer = explain(Slurm(scontrol=shown))
    assert (answer.cause, answer.host, answer.state) == ("python-module-missing", "tu01", "FAILED")


def test_the_reason_why_a_job_waits_is_the_controllers_where_the_accounting_has_none() -> None:
    waiting = row(JobID="1", JobName="t", State="PENDING", Reason="None", Start="Unknown") + "\n"
    shown = "JobId=1 JobName=t JobState=PENDING Reason=JobHeldUser StartTime=Unknown WorkDir=/x\n"
    record = gather_foreign("1", runner=Slurm(sacct=waiting, scontrol=shown)).record
    assert record is not None
    assert (record.state, record.reason) == (State.PENDING, "JobHeldUser")


def test_a_job_that_runs_is_not_explained_by_the_end_of_an_earlier_one_with_its_id() -> None:
    """The accounting lacks the row of the job that runs; of a federation it may come before the earlier one."""
    shown = "JobId=1 JobName=new JobState=RUNNING Reason=None StartTime=2000 NodeList=tu03\n"
    record = gather_foreign("1", runner=Slurm(sacct=sacct(), scontrol=shown)).record
    assert record is not None
    assert (record.state, record.name) == (State.RUNNING, "new")


def test_of_a_job_that_the_scheduler_does_not_know_nobody_says_that_it_has_not_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commands := here / "bin").mkdir()
    (here / "mine.yaml").write_text("partitions: {cpu: {nodes: 4, node: {cpus: 4, mem: 8G}}}\n")
    answer_command(commands, "sbatch", "echo 7")
    answer_command(commands, "squeue", "")
    answer_command(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    answer_command(commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    ok("submit", "--site", "./mine.yaml", "true")
    assert ok("why", "7").out == "job 7 UNKNOWN: the scheduler does not know it, and it wrote no end\n"


def shown(**values: str) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items()) + "\n"


def test_of_an_array_the_task_that_failed_is_explained_from_its_own_log(tmp_path: Path) -> None:
    (tmp_path / "a_1.out").write_text("done\n")
    (tmp_path / "a_2.out").write_text("ModuleNotFoundError: No module named 'x'\n")
    common = {"ArrayJobId": "7", "JobName": "t", "WorkDir": str(tmp_path)}
    tasks = shown(JobId="7", ArrayTaskId="1", JobState="COMPLETED", StdOut=f"{tmp_path}/a_1.out", **common)
    tasks += shown(
        JobId="8", ArrayTaskId="2", JobState="FAILED", ExitCode="1:0", StdOut=f"{tmp_path}/a_2.out", **common
    )
    rows = (
        row(JobID="7_1", JobName="t", State="COMPLETED") + "\n" + row(JobID="7_2", JobName="t", State="FAILED") + "\n"
    )
    for slurm in (Slurm(scontrol=tasks, sacct=rows), Slurm(scontrol=tasks)):
        subject = gather_foreign("7", runner=slurm)
        answer = diagnose(subject.facts, subject.lines)
        assert (answer.job_id, answer.state, answer.cause) == ("7_2", "FAILED", "python-module-missing")


def test_of_a_heterogeneous_job_the_component_that_failed_is_explained(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "het.out").write_text("0: ValueError: bad\n")
    components = shown(JobId="24", HetJobId="24", HetJobOffset="0", JobState="COMPLETED", StdOut=f"{here}/no")
    second = shown(JobId="25", HetJobId="24", HetJobOffset="1", JobState="FAILED", StdOut=f"{here}/het.out")
    subject = gather_foreign("24", runner=Slurm(scontrol=components + second))
    assert diagnose(subject.facts, subject.lines).job_id == "24+1"
    (commands := here / "bin").mkdir()
    answer_command(commands, "sacct", "exit 1")
    answer_command(commands, "scontrol", f"echo '{second.strip()}'")
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    assert ok("why", "24+1").out.startswith("job 24+1: FAILED\ncause: The program ended with ValueError: bad")


def test_the_file_of_standard_error_is_read_and_those_of_each_rank(tmp_path: Path) -> None:
    (tmp_path / "5_0_log.out").write_text("epoch 1\n")
    (tmp_path / "5_0_log.err").write_text("")
    (tmp_path / "5_1_log.err").write_text("Traceback (most recent call last):\nKeyError: 'label'\n")
    streams = {"StdOut": f"{tmp_path}/5_0_log.out", "StdErr": f"{tmp_path}/5_0_log.err"}
    subject = gather_foreign("5", runner=Slurm(scontrol=shown(JobId="5", JobState="FAILED", ExitCode="1:0", **streams)))
    answer = diagnose(subject.facts, subject.lines)
    assert (answer.cause, answer.rank) == ("python-error", 1)
    assert [Path(log).name for log in answer.logs] == ["5_0_log.out", "5_0_log.err", "5_1_log.err"]


SCRIPT_OF_STEPS = """#!/bin/bash
#SBATCH -o main.out
# srun -o comment_%t.out true
srun -n 2 --output=logs/%x_$SLURM_JOB_ID-%t.out \\
    -e logs/%j_%2t.err python train.py | tee -o no_%t.out
"""


def test_the_files_of_each_rank_that_srun_writes_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SCRIPT_OF_STEPS)
    (logs := tmp_path / "logs").mkdir()
    (tmp_path / "main.out").write_text("srun: error: tu01: task 1: Exited with exit code 1\n")
    (logs / "t_5-0.out").write_text("epoch 1\n")
    (logs / "5_01.err").write_text("Traceback (most recent call last):\nKeyError: 'label'\n")
    for other in ("t_5-x.out", "t_6-0.out", "../comment_0.out", "../no_0.out"):
        (logs / other).write_text("ValueError: of something else\n")
    values = {"JobId": "5", "JobName": "t", "JobState": "FAILED", "ExitCode": "1:0", "WorkDir": str(tmp_path)}
    slurm = Slurm(scontrol=shown(**values, StdOut=f"{tmp_path}/main.out", Command=f"{tmp_path}/job.sh"))
    subject = gather_foreign("5", runner=slurm)
    answer = diagnose(subject.facts, subject.lines)
    assert [Path(log).name for log in answer.logs] == ["main.out", "t_5-0.out", "5_01.err"]
    assert (answer.cause, answer.rank) == ("python-error", 1)


def test_the_files_of_a_job_that_the_controller_forgot_are_those_of_its_script(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.sh").write_text("#!/bin/bash\n#SBATCH -o %x-%j.out -e %x-%j.err\nfalse\n")
    (here / "t-1.err").write_text("ModuleNotFoundError: No module named 'x'\n")
    (commands := here / "bin").mkdir()
    answer_command(commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    answer_command(commands, "sacct", f'exec python3 {here}/sacct.py "$@"')
    values = {"JobID": "1", "JobIDRaw": "1", "JobName": "t", "State": "FAILED", "ExitCode": "1:0"}
    values |= {"WorkDir": str(here), "SubmitLine": "sbatch -N1 job.sh"}
    (here / "sacct.py").write_text(
        "import sys\n"
        "given = dict(word.partition('=')[::2] for word in sys.argv)\n"
        f"values = {values!r}\n"
        "print(given['--delimiter'].join(values.get(name, '') for name in given['--format'].split(',')))\n"
    )
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    assert "No module named 'x'" in ok("why", "1").out


def test_why_of_a_job_that_waits_on_another_host_names_the_host(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ok("submit", "--site", "local", "-t", "1", "sleep", "60")
    ok("submit", "--site", "local", "-t", "1", "--after-any", "L1", "true")
    with monkeypatch.context() as other:
        other.setattr(os, "uname", lambda: SimpleNamespace(nodename="login2"))
        answer = ok("why", "L2").out
    ok("cancel", "L2", "L1")
    assert re.fullmatch(r"job L2 UNKNOWN \(on (host .+)\): `hpcjobs why` on \1 knows\n", answer), answer


def test_why_of_a_job_of_another_user_says_that_this_user_can_ask(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ok("submit", "--site", "local", "-t", "1", "sleep", "60")
    ok("submit", "--site", "local", "-t", "1", "--name", "second", "--after-any", "L1", "true")
    (run_dir,) = here.glob("runs/second-*")
    with monkeypatch.context() as other:
        other.setattr("hpcjobs.run.status.user_name", lambda: "guest")
        answer, refused = ok("why", str(run_dir)).out, within("wait", str(run_dir), "--timeout", "1")
    ok("cancel", "L2", "L1")
    assert re.fullmatch(r"job L2 UNKNOWN \(of user .+\): that user can ask\n", answer), answer
    assert "hint: that user can run the command; `hpcjobs show " in refused.err
