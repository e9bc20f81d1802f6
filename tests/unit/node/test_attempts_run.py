"""The process that decides, as a job script starts it: with a script that ends in every way, and stubs for Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from interpreters import interpreter

from hpcjobs.node import supervisor
from hpcjobs.packing import pack
from hpcjobs.processes.tree import children
from hpcjobs.record.state import Attempt
from hpcjobs.record.values import encode
from hpcjobs.scheduler_kind import KINDS

BUDGETS = "timeout=1000000000,preempt=1000000000,node=3,error=0"
SAVED = 'echo 5 >"$HPCJOBS_CONTROL_DIR/progress"; echo 5 >"$HPCJOBS_CONTROL_DIR/requeue"; '
AWAIT_SIGNAL = "for _ in {1..60}; do read -rt 1 <> <(:); done"
"""For a minute; a signal that comes just before a read is heard after it."""
SCONTROL = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
    *"show job"*) cat "$JOB" ;;
    "show config") echo 'KillWait                = 2 sec' ;;
    "show hostnames"*) printf 'here\\nthere\\n' ;;
esac
"""


class Node:
    """The first node of a job, with Slurm's commands played by stubs."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.python, self.run_dir, self.control = python, folder / "run", folder / "run" / "control"
        self.run_dir.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "scontrol").write_text(SCONTROL)
        for name in ("sdiag", "sacct", "sbatch"):
            (folder / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        for path in (folder / "bin").iterdir():
            path.chmod(0o755)
        (self.run_dir / "node.pyz").write_bytes(pack("hpcjobs.node"))
        self.log, self.job = folder / "scontrol.log", folder / "job"
        self.says("JobId=42 JobState=RUNNING Reason=None Restarts=0")
        self.environ = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "LOG": str(self.log),
            "JOB": str(self.job),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "here",
            "HPCJOBS_JOB_ID": "42",
            "HPCJOBS_AGAIN": str(folder / "again"),
        }

    def says(self, job: str) -> None:
        """What ``scontrol show job`` prints."""
        self.job.write_text(job + "\n")

    def begin(
        self,
        script: str,
        *options: str,
        scheduler: str = "slurm",
        stderr: int | IO[str] = subprocess.PIPE,
        **environ: str,
    ) -> subprocess.Popen[str]:
        arguments = [self.python, "-I", str(self.run_dir / "node.pyz"), "attempts", "--run-dir", str(self.run_dir)]
        arguments += ["--scheduler", scheduler, "--budgets", BUDGETS, "--warning", "300", "--tasks", "1", *options]
        return subprocess.Popen(
            [*arguments, "--", "bash", "-c", script],
            env={**self.environ, **environ},
            stderr=stderr,
            text=True,
        )

    def run(self, script: str, *options: str, scheduler: str = "slurm", **environ: str) -> tuple[int, str]:
        process = self.begin(script, *options, scheduler=scheduler, **environ)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "attempts.jsonl").read_text().splitlines()]

    @property
    def state(self) -> str:
        return str(json.loads((self.run_dir / "state.json").read_text())["state"])

    @property
    def suspects(self) -> list[str]:
        path = self.control / "suspects"
        return path.read_text().split() if path.exists() else []

    @property
    def requeued(self) -> bool:
        return self.log.exists() and "requeue 42" in self.log.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def stat_of(pid: int) -> str:
    """The process's line of the kernel's table: its pid, name, state and so on."""
    return Path(f"/proc/{pid}/stat").read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("version", ["3.6", "3.13"])
def test_the_oldest_and_the_newest_python_run_a_job_from_its_first_attempt_to_its_end(
    tmp_path: Path, version: str
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    node = Node(tmp_path, python)
    code, err = node.run(SAVED, scheduler="local")
    assert code == 85, err
    assert (tmp_path / "again").exists()
    done = 'touch "$HPCJOBS_CONTROL_DIR/completed"; echo 0 >"$HPCJOBS_CONTROL_DIR/ends/0"'
    code, err = node.run(done, scheduler="local", SLURM_RESTART_COUNT="1")
    assert (code, node.state) == (0, "COMPLETED"), err
    assert [each["cause"] for each in node.history] == ["preempt", "completed"]


def test_a_script_that_was_killed_after_all_was_saved_is_requeued(node: Node) -> None:
    code, err = node.run(SAVED + "kill -9 $$")
    assert (code, node.state, node.requeued) == (137, "REQUEUED", True), err
    assert [(each["cause"], each["saved"]) for each in node.history] == [("preempt", 5)]


def test_ranks_of_a_script_that_was_killed_save_before_the_job_is_requeued(node: Node) -> None:
    launcher = f"""(trap '{SAVED} exit' USR1; touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}) & """
    ready = 'until [ -e "$HPCJOBS_CONTROL_DIR/ready" ]; do sleep 0.01; done; '
    began = time.monotonic()
    code, err = node.run(launcher + ready + "kill -9 $$")
    assert (code, node.state, node.requeued) == (137, "REQUEUED", True), err
    assert node.history[0]["saved"] == 5
    assert time.monotonic() - began < 30


def test_after_sigterm_a_script_that_takes_its_time_is_awaited_without_a_busy_loop(node: Node) -> None:
    deaf = "trap '' TERM; touch $HPCJOBS_CONTROL_DIR/ready; sleep 6"
    deadline = f"{time.time() + 61:.0f}"
    process = node.begin(deaf, "--signal-before", "58", scheduler="local", HPCJOBS_DEADLINE=deadline)
    wait_until((node.control / "ready").exists)
    process.terminate()
    _, _, usage = os.wait4(process.pid, 0)
    process.communicate()
    assert usage.ru_utime + usage.ru_stime < 1.5


def test_the_limit_of_an_earlier_attempt_is_not_taken_for_that_of_the_next_one(node: Node) -> None:
    node.control.mkdir()
    (node.control / "deadline").write_text("1700000000\n")
    copy = f'cp "$HPCJOBS_CONTROL_DIR/deadline" {node.run_dir}/known'
    assert node.run(copy, HPCJOBS_DEADLINE="")[0] == 0
    assert (node.run_dir / "known").read_text() == "inf\n"


def test_a_program_that_leaves_by_85_without_a_word_is_started_again(node: Node) -> None:
    code, _ = node.run('echo 85 >"$HPCJOBS_CONTROL_DIR/ends/0"', scheduler="local")
    assert (code, node.state) == (85, "REQUEUED")
    assert [(each["cause"], each["decision"]) for each in node.history] == [("preempt", "requeued")]


def test_a_start_after_the_end_of_a_job_writes_the_end_that_a_kill_kept_it_from_writing(node: Node) -> None:
    done = 'touch "$HPCJOBS_CONTROL_DIR/completed"'
    assert node.run(done)[0] == 0
    state = node.run_dir / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "RUNNING", "ended": None, "started": 1000}))
    assert node.run(done, SLURM_RESTART_COUNT="1")[0] == 0
    content = json.loads(state.read_text())
    assert (content["state"], content["restarts"]) == ("COMPLETED", 1)
    assert content["started"] > 1000


def test_a_job_that_slurm_starts_again_after_its_end_ends_at_once_with_0(node: Node) -> None:
    done = 'touch "$HPCJOBS_CONTROL_DIR/completed" "$HPCJOBS_RUN_DIR/ran"'
    runs = {"HPCJOBS_RUN_DIR": str(node.run_dir)}
    assert node.run(done, **runs)[0] == 0
    (node.run_dir / "ran").unlink()
    code, err = node.run(done, **runs, SLURM_RESTART_COUNT="1")
    assert (code, node.state, len(node.history)) == (0, "COMPLETED", 1), err
    assert not (node.run_dir / "ran").exists()
    assert node.run(done, **runs, SLURM_JOB_ID="43")[0] == 0  # another job that its user submitted with this script
    assert (node.run_dir / "ran").exists()


def test_a_preempted_job_that_slurm_starts_again_after_it_failed_ends_at_once_with_its_code(node: Node) -> None:
    """Slurm 24.11 requeues such a job at its end; a user who requeues it later gets another attempt."""
    fails = '[ ! -e "$0" ] || exit 7; touch "$0"; ' + SAVED + 'echo 85 >"$HPCJOBS_CONTROL_DIR/ends/0"'
    fails = fails.replace("$0", f"{node.run_dir}/ran")
    assert node.run(fails)[0] == 85
    assert node.run(fails, SLURM_RESTART_COUNT="1")[0] == 7
    decisions = [each["decision"] for each in node.history]
    assert decisions == ["requeued", "ended: the budget error=0 is spent"]
    ended = node.history[-1]["ended"]
    node.says(f"JobId=42 JobState=RUNNING Reason=None Restarts=2 SubmitTime={ended + 1}")
    code, err = node.run(fails, SLURM_RESTART_COUNT="2")
    assert (code, node.state, len(node.history)) == (7, "FAILED", 2), err
    assert "this job has ended: nothing is left to do (ended: the budget error=0 is spent)" in err
    node.says(f"JobId=42 JobState=RUNNING Reason=None Restarts=3 SubmitTime={ended + 300}")
    assert node.run(fails, SLURM_RESTART_COUNT="3")[0] == 7
    assert len(node.history) == 3


def test_only_the_start_that_reports_the_end_of_an_orphaned_job_does_nothing(node: Node) -> None:
    """A job that failed, and that its user requeues by hand later, gets another attempt."""
    fails = f'touch "{node.run_dir}/ran"; exit 7'
    assert node.run(fails)[0] == 7
    (node.control / "finished").write_text("42=7\n")  # slurmstepd was killed meanwhile
    (node.run_dir / "ran").unlink()
    node.says("JobId=42 JobState=RUNNING Reason=None Restarts=1")
    code, err = node.run(fails, SLURM_RESTART_COUNT="1")
    assert (code, node.state, (node.run_dir / "ran").exists()) == (7, "FAILED", False), err
    node.says("JobId=42 JobState=RUNNING Reason=None Restarts=2")
    code, err = node.run(fails, SLURM_RESTART_COUNT="2")
    assert (code, node.state, (node.run_dir / "ran").exists()) == (7, "FAILED", True), err
    assert [each["cause"] for each in node.history] == ["error", "error"]


def test_term_is_taken_for_what_slurm_says_it_is(node: Node) -> None:
    waits = f"trap '{SAVED} exit 143' TERM; touch \"$HPCJOBS_CONTROL_DIR/ready\"; {AWAIT_SIGNAL}"
    for says, state in (
        ("JobState=COMPLETING Reason=None Restarts=0", "CANCELLED"),
        ("JobState=COMPLETING Reason=BeginTime Restarts=1", "REQUEUED"),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0", "REQUEUED"),
    ):
        (node.control / "ready").unlink(missing_ok=True)
        node.says("JobState=RUNNING Restarts=0")
        process = node.begin(waits)
        wait_until((node.control / "ready").exists)
        node.says(says)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert node.state == state
        shutil.copy(node.run_dir / "state.json", node.run_dir / says.split()[1])
        if "Restarts=1" in says:
            assert json.loads((node.control / "running").read_text())["pid"] == 0
            (node.control / "running").unlink()
    assert [each["cause"] for each in node.history] == ["timeout"]
    assert node.requeued


@pytest.mark.parametrize("code", [1, 85, 137, 143])
def test_a_job_whose_ranks_end_by_a_cancellation_before_its_signal_reaches_the_supervisor_stays_cancelled(
    node: Node, code: int
) -> None:
    status, err = node.run(f'echo "JobId=42 JobState=COMPLETING Reason=None" >"$JOB"; exit {code}')
    assert (status, node.state, node.requeued) == (143, "CANCELLED", False), err


def test_a_program_that_ends_by_sigterm_at_its_time_limit_is_requeued_for_that(node: Node) -> None:
    saved = 'echo 5 >"$HPCJOBS_CONTROL_DIR/progress"; '
    _, err = node.run(saved + 'echo "JobId=42 JobState=COMPLETING Reason=TimeLimit" >"$JOB"; exit 143')
    assert ([each["cause"] for each in node.history], node.requeued) == (["timeout"], True), err


def test_a_cancellation_during_a_question_for_the_time_limit_is_heard_though_slurm_gives_no_answer(
    node: Node, tmp_path: Path
) -> None:
    rank = tmp_path / "rank"
    (tmp_path / "bin" / "scontrol").write_text(
        f"""#!/bin/sh
echo "$*" >>"$LOG"
[ -e {rank} ] || exit 1
pid=$(cat {rank})
rm {rank}
kill -TERM $pid $PPID
until grep -q ') Z ' /proc/$pid/stat; do sleep 0.01; done
exit 1
"""
    )
    script = f"trap 'exit 143' TERM; echo $$ >{rank}.new; mv {rank}.new {rank}; kill -USR1 $PPID; {AWAIT_SIGNAL}"
    status, err = node.run(script)
    assert (status, node.state, node.requeued) == (143, "CANCELLED", False), err


def test_a_job_that_is_cancelled_between_its_programs_end_and_its_own_requeue_stays_cancelled(
    node: Node, tmp_path: Path
) -> None:
    """Slurm is asked for the job once after the program's end; a cancellation after that was undone by the requeue."""
    (tmp_path / "bin" / "scontrol").write_text(
        SCONTROL.replace("esac", f'esac\n[ ! -e {tmp_path}/ended ] || echo "JobState=COMPLETING Reason=None" >"$JOB"')
    )
    status, err = node.run(f"{SAVED} touch {tmp_path}/ended; exit 85")
    assert (status, node.state, node.requeued) == (85, "CANCELLED", False), err
    assert [each["decision"] for each in node.history] == ["ended: the job was cancelled"]


@pytest.mark.parametrize("requeued_s", [10, 1000])
def test_a_start_that_a_cancelled_job_had_requested_before_ends_at_once_and_one_of_its_user_runs(
    node: Node, requeued_s: int
) -> None:
    """`hpcjobs cancel` notes the cancellation in the folder: Slurm itself has forgotten it after the requeue."""
    assert node.run(f"{SAVED} exit 85")[0] == 85
    (node.control / "cancelled").write_text("1700000000\n")
    node.says(f"JobId=42 JobState=RUNNING Reason=None Restarts=1 SubmitTime={1_700_000_000 + requeued_s}")
    (node.run_dir.parent / "bin" / "scancel").symlink_to("scontrol")
    code, err = node.run('touch "$HPCJOBS_CONTROL_DIR/../ran"; exit 7', SLURM_RESTART_COUNT="1")
    was_ended = requeued_s < 300
    assert (code, node.state) == ((143, "CANCELLED") if was_ended else (7, "FAILED")), err
    assert (node.run_dir / "ran").exists() != was_ended
    assert ("--quiet 42" in node.log.read_text().splitlines()) == was_ended
    assert not (node.control / "cancelled").exists()


def test_a_cancellation_is_recorded_before_the_kill_where_the_launcher_outlasts_it(node: Node) -> None:
    """As srun does whose step had not yet begun when Slurm signalled the steps."""
    process = node.begin(f"""trap '' TERM; touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}""")
    wait_until((node.control / "ready").exists)
    node.says("JobState=COMPLETING Reason=None Restarts=0")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: node.state == "CANCELLED")
    assert time.monotonic() - began < 30  # Slurm's KillWait; the launcher itself stays for 60 s
    for pid in [*children(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)


def test_a_history_that_cannot_be_read_holds_the_job_instead_of_spending_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.run_dir / "attempts.jsonl").mkdir()
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    options = supervisor.Options(
        **{**dict.fromkeys(supervisor.Options._fields), "run_dir": str(node.run_dir), "scheduler": "slurm"}  # type: ignore[arg-type]
    )
    job = supervisor.CurrentAttempt(
        options, supervisor.connect(options, dict(os.environ)), job_id="42", nodes="here", started=1
    )

    class NoSignals:
        def wait(self, timeout_s: float) -> list[int]:
            return []

    assert supervisor.wait_for_history(job, NoSignals(), patience_s=0) is None  # type: ignore[arg-type]
    assert "job 42 is held" in job.scheduler.hold()
    assert "requeuehold 42" in node.log.read_text()


@pytest.mark.parametrize("requeues", [True, False])
@pytest.mark.parametrize(("kind", "command"), [("slurm", "scontrol"), ("local", None)])
def test_whether_a_scheduler_requeues_does_not_decide_how_a_job_asks_for_another_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str, command: str | None, requeues: bool
) -> None:
    """A cluster may have no requeue, and a queue of one machine one: with Slurm's variables Slurm's commands count."""
    monkeypatch.setitem(KINDS, "spool", KINDS[kind]._replace(may_requeue=requeues))
    known = {"run_dir": str(node.run_dir), "scheduler": "spool"}
    options = supervisor.Options(**{**dict.fromkeys(supervisor.Options._fields), **known})  # type: ignore[arg-type]
    supervisor.connect(options, node.environ).start_again([])
    assert (node.log.exists(), Path(node.environ["HPCJOBS_AGAIN"]).exists()) == (command is not None, command is None)


def test_the_report_of_a_task_of_an_array_names_it_as_the_other_commands_do(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**node.environ, "SLURM_ARRAY_JOB_ID": "24", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    report = node.run_dir / "report"
    known = {"run_dir": str(node.run_dir), "scheduler": "slurm"}
    options = supervisor.Options(**{**dict.fromkeys(supervisor.Options._fields), **known})._replace(  # type: ignore[arg-type]
        notify=["sh", "-c", f'printf %s "$HPCJOBS_JOB_ID" >{report}']
    )
    scheduler = supervisor.connect(options, dict(os.environ))
    job = supervisor.CurrentAttempt(options, scheduler, job_id="42", nodes="here", started=1)
    job.write_state("FAILED", 1, 2)
    assert report.read_text() == "24_3"


@pytest.mark.parametrize(
    ("reaped", "reason"),
    [(True, "JobLaunchFailure"), (False, "NonZeroExitCode"), (True, "RaisedSignal:9(Killed)")],
)
def test_a_job_whose_deciding_process_was_killed_is_requeued_by_rank_0(node: Node, reaped: bool, reason: str) -> None:
    """Also where nobody waits for that process, since slurmstepd was killed as well."""
    process = node.begin(f'touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}')
    wait_until((node.control / "ready").exists)
    (script,) = children(process.pid)
    process.kill()
    os.kill(script, signal.SIGKILL)
    if reaped:
        process.communicate(timeout=60)
    else:
        wait_until(lambda: stat_of(process.pid).rpartition(")")[2].split()[0] == "Z")
    node.says(f"JobState=COMPLETING Reason={reason} Restarts=0")
    done = subprocess.run(["sh", node.control / "aftermath"], env=node.environ, capture_output=True, text=True)
    assert (done.returncode, node.state, node.requeued) == (0, "REQUEUED", True), done.stderr
    assert [(each["cause"], each["exit_code"]) for each in node.history] == [("node", 137)]
    again = subprocess.run(["sh", node.control / "aftermath"], env=node.environ, capture_output=True, text=True)
    assert (again.returncode, len(node.history)) == (0, 1)
    process.communicate(timeout=60)


def test_rank_0_does_not_start_a_cancelled_job_again_whose_deciding_process_was_killed(node: Node) -> None:
    process = node.begin(f'touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}')
    wait_until((node.control / "ready").exists)
    (script,) = children(process.pid)
    node.says("JobId=42 JobState=COMPLETING Reason=None ExitCode=0:9 Restarts=0")
    process.kill()
    os.kill(script, signal.SIGKILL)
    process.communicate(timeout=60)
    done = subprocess.run(["sh", node.control / "aftermath"], env=node.environ, capture_output=True, text=True)
    assert (done.returncode, node.state, node.requeued) == (0, "CANCELLED", False), done.stderr
    assert not (node.run_dir / "attempts.jsonl").exists()


def test_rank_0_decides_nothing_while_the_deciding_process_lives(node: Node) -> None:
    process = node.begin(f'touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}')
    wait_until((node.control / "ready").exists)
    subprocess.run(["sh", node.control / "aftermath"], env=node.environ, check=True)
    assert not (node.run_dir / "attempts.jsonl").exists()
    process.terminate()
    process.communicate(timeout=60)


def test_of_two_nodes_the_second_is_suspected_if_no_task_began_at_all(node: Node) -> None:
    node.run("exit 137", "--tasks", "2")
    assert node.requeued
    assert (node.control / "suspects").read_text().split() == ["there"]


@pytest.mark.parametrize(
    ("message", "suspects"),
    [
        ("srun: error: Task launch for StepId=42.0 failed on node there: Job credential expired", ["there"]),
        ("srun: error: Unable to create step for job 42: Zero Bytes were transmitted or received", []),
    ],
)
def test_the_node_on_which_srun_could_not_start_its_tasks_is_suspected_and_not_the_program(
    node: Node, message: str, suspects: list[str]
) -> None:
    stub = (node.run_dir.parent / "bin" / "scontrol").read_text()
    (node.run_dir.parent / "bin" / "scontrol").write_text(stub.replace("there", "elsewhere\\nthere"))
    log, left = node.run_dir / "log", 'echo 233 >"$HPCJOBS_CONTROL_DIR/step_code"; '
    log.write_text("srun: error: Task launch for StepId=42.0 failed on node elsewhere: of an earlier attempt\n")
    with log.open("a") as output:
        process = node.begin(f"echo '{message}' >&2; {left}exit 233", "--tasks", "3", stderr=output)
        assert process.wait(timeout=60) == (137 if suspects else 233)
    assert node.suspects == suspects
    assert [each["cause"] for each in node.history] == ["node" if suspects else "error"]


@pytest.mark.parametrize(
    "message", ["0: RuntimeError: CUDA error: uncorrectable ECC error encountered", "0: KeyError: 3"]
)
def test_a_program_that_reports_a_broken_gpu_spends_the_budget_of_nodes_and_its_host_is_suspected(
    node: Node, message: str
) -> None:
    log = node.run_dir / "log"
    broken = "ECC" in message
    left = 'touch "$HPCJOBS_CONTROL_DIR/started/here" "$HPCJOBS_CONTROL_DIR/started/there"; '
    left += 'echo 1 >"$HPCJOBS_CONTROL_DIR/step_code"; '
    left += 'echo 1 >"$HPCJOBS_CONTROL_DIR/ends/0"; echo "1 0 there" >"${HPCJOBS_CONTROL_DIR%/*}/first_failure"; '
    with log.open("w") as output:
        process = node.begin(f"echo '{message}' >&2; {left}exit 1", stderr=output)
        assert process.wait(timeout=60) == 1
    assert [each["cause"] for each in node.history] == ["node" if broken else "error"]
    assert node.suspects == (["there"] if broken else [])
    assert node.requeued == broken


DUPLICATE = "Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
TOO_MANY = "RuntimeError: CUDA error: invalid device ordinal"
NO_INTERFACE = "Bootstrap : no socket interface found"
ADAPTED = "flash attention is off: CUDA error: no kernel image is available for execution on the device"
TOO = "A rank asked for a GPU by a number that it does not see"
TRACEBACK = "Traceback (most recent call last):"
HANDLING = "During handling of the above exception, another exception occurred:"
IGNORED = "Exception ignored in: <function Loader.__del__ at 0x7f00>"
AGAIN = ["1: on the CPU, then", "1: step 1", "1: step 2"]
NO_DEVICE = "E cuda_driver.cc:266] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
OLD_DRIVER = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([f"1: {DUPLICATE}", "0: ValueError: no such column"], "Two ranks use the same GPU"),
        ([f" 1: {TOO_MANY}"], TOO),
        ([f"01: {NO_INTERFACE}"], "The network interface that NCCL or Gloo was told to use is not on the node"),
        ([DUPLICATE], "Two ranks use the same GPU"),
        ([f"0: {DUPLICATE}", "1: ValueError: no such column"], None),
        ([f"1: {OLD_DRIVER}", "1: ValueError: no such column"], None),
        ([f"1: {NO_DEVICE}", "1: step 1", f"1: {TRACEBACK}", "1: OSError: [Errno 5] Input/output error"], None),
        ([f"1: {TRACEBACK}", f"1: {TOO_MANY}", "1: ", f"1: {HANDLING}", "1: ", f"1: {TRACEBACK}", "1: KeyError"], TOO),
        ([f"1: {TRACEBACK}", f"1: {TOO_MANY}", *AGAIN, f"1: {TRACEBACK}", "1: Broken pipe"], None),
        ([f"1: {TRACEBACK}", f"1: {TOO_MANY}", f"1: {IGNORED}", f"1: {TRACEBACK}", "1: AttributeError: y"], TOO),
        ([f"[rank0]: {TRACEBACK}", TOO_MANY, TRACEBACK, "torch.distributed.elastic. ... ChildFailedError: "], TOO),
        ([f"1: {ADAPTED}", *(f"1: step {step}" for step in range(300)), "1: ValueError: no such column"], None),
    ],
)
def test_a_script_that_fails_by_its_configuration_of_gpus_or_network_is_not_retried_though_errors_are(
    node: Node, lines: list[str], reason: str | None
) -> None:
    """By the last lines of the rank that failed first; the program's own exit code says nothing of it."""
    printed = node.run_dir / "printed"
    printed.write_text("\n".join([*lines, ""]))
    failed = f"cat {printed} >&2; " + 'echo "1 1 there" >"${HPCJOBS_CONTROL_DIR%/*}/first_failure"; exit 1'
    with (node.run_dir / "log").open("w") as output:
        process = node.begin(failed, "--budgets", BUDGETS.replace("error=0", "error=3"), stderr=output)
        assert process.wait(timeout=60) == 1
    same = "ended: the configuration cannot work, and another attempt would meet the same: "
    assert [each["decision"] for each in node.history] == ["requeued" if reason is None else same + reason]
    assert node.requeued == (reason is None)
    assert node.suspects == []


def test_a_node_on_which_no_task_began_is_suspected(node: Node) -> None:
    began = 'touch "$HPCJOBS_CONTROL_DIR/started/here"; '
    code, err = node.run(began + 'echo 137 >"$HPCJOBS_CONTROL_DIR/step_code"; exit 137')
    assert (code, node.history[0]["cause"]) == (137, "node"), err
    assert (node.control / "suspects").read_text().split() == ["there"]


def test_a_script_without_ranks_completes_by_its_exit_code(node: Node) -> None:
    code, err = node.run("true")  # a template of one's own, say
    assert (code, node.state) == (0, "COMPLETED"), err
    assert node.run("true", "--tasks", "0", SLURM_JOB_ID="43")[0] == 0
    assert [each["cause"] for each in node.history] == ["completed", "completed"]
    code, err = node.run('touch "$HPCJOBS_CONTROL_DIR/started/here"', SLURM_JOB_ID="44")  # Slurm has ended its step
    assert (code, node.state) == (143, "CANCELLED"), err


def test_an_attempt_whose_process_was_killed_after_its_line_was_written_counts_once(node: Node) -> None:
    fails = 'cp "$HPCJOBS_CONTROL_DIR/running" "$HPCJOBS_RUN_DIR/kept"; '
    fails += 'echo "$SLURM_RESTART_COUNT" >"$HPCJOBS_CONTROL_DIR/progress"; exit 18'
    for restarts in range(3):
        _, err = node.run(fails, HPCJOBS_RUN_DIR=str(node.run_dir), SLURM_RESTART_COUNT=str(restarts))
        assert [each["decision"] for each in node.history] == ["requeued"] * (restarts + 1), err
        shutil.copy(node.run_dir / "kept", node.control / "running")  # killed before it was removed


def test_an_attempt_that_could_not_be_recorded_counts_for_its_budget(node: Node) -> None:
    budgets = ("--budgets", "timeout=9,preempt=9,node=1,error=0")
    (node.run_dir / "attempts.jsonl").symlink_to(node.run_dir / "gone" / "attempts.jsonl")
    code, err = node.run("exit 137", *budgets)
    assert (code, node.requeued) == (137, True)
    assert "the attempt that attempts.jsonl lacks counts for every budget" in err
    (node.run_dir / "attempts.jsonl").unlink()
    node.says("JobId=42 JobState=RUNNING Reason=None Restarts=1")
    _, err = node.run("exit 137", *budgets, SLURM_RESTART_COUNT="1")
    assert "node at step 0, saved up to 0; ended: the budget node=1 is spent" in err


REQUEUE_REFUSED = SCONTROL.replace(
    "esac", "    requeue*) echo 'Requested operation is presently disabled' >&2; exit 1 ;;\nesac"
)


def test_no_other_job_continues_one_whose_attempt_could_not_be_recorded(node: Node, tmp_path: Path) -> None:
    """Another job's restart count begins again at 0: each would be taken for the first, without end."""
    (tmp_path / "bin" / "scontrol").write_text(REQUEUE_REFUSED)
    sbatch = f"""#!/bin/sh\ncase "$*" in *--parsable*) touch {tmp_path}/submitted; echo 43 ;; esac\n"""
    (tmp_path / "bin" / "sbatch").write_text(sbatch)
    budgets = ("--budgets", "timeout=9,preempt=9,node=1,error=0")
    earlier = encode(Attempt("41", 1, 2, "here", 85, "preempt", 5, 5, "resubmitted as 42")) + "\n"
    attempts = node.run_dir / "attempts.jsonl"
    attempts.write_text(earlier)
    full = f"mv {attempts} {attempts}.old; ln -s gone/attempts.jsonl {attempts}; exit 137"
    code, err = node.run(full, *budgets)
    assert (code, node.state, (tmp_path / "submitted").exists()) == (137, "FAILED", False), err
    assert "no other job continues this one, because attempts.jsonl lacks this attempt: no budget counts it" in err
    assert "counts for every budget" not in err
    attempts.unlink()
    attempts.write_text(earlier)
    code, err = node.run("exit 137", *budgets)
    assert (code, node.state, (tmp_path / "submitted").exists()) == (137, "REQUEUED", True), err
    assert [each["decision"] for each in node.history] == ["resubmitted as 42", "resubmitted as 43"]


def test_the_end_of_an_orphaned_job_is_not_run_again_as_another_job(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "scontrol").write_text(REQUEUE_REFUSED)
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\necho 43\n")
    node.control.mkdir()
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    options = supervisor.Options(
        **{**dict.fromkeys(supervisor.Options._fields), "run_dir": str(node.run_dir), "scheduler": "slurm"}  # type: ignore[arg-type]
    )
    connected = supervisor.connect(options, dict(os.environ))
    job = supervisor.CurrentAttempt(options, connected, job_id="42", nodes="here", started=1)
    supervisor.leave_orphaned(job, 0)
    assert node.requeued
    assert not (tmp_path / "submitted").exists()


def test_rank_0_carries_out_what_was_decided_before_the_deciding_process_was_killed(node: Node) -> None:
    process = node.begin(f'touch "$HPCJOBS_CONTROL_DIR/ready"; {AWAIT_SIGNAL}')
    wait_until((node.control / "ready").exists)
    (script,) = children(process.pid)
    process.kill()
    os.kill(script, signal.SIGKILL)
    process.communicate(timeout=60)
    running = json.loads((node.control / "running").read_text())
    line = encode(Attempt("42", running["started"], running["started"] + 9, "here", 138, "preempt", 0, 0, "requeued"))
    (node.run_dir / "attempts.jsonl").write_text(line + "\n")
    done = subprocess.run(["sh", node.control / "aftermath"], env=node.environ, capture_output=True, text=True)
    assert (done.returncode, node.state, node.requeued) == (0, "REQUEUED", True), done.stderr
    assert [each["cause"] for each in node.history] == ["preempt"]


def test_a_job_that_continues_another_one_records_that_itself_where_the_other_was_killed_before(node: Node) -> None:
    line = encode(Attempt("41", 1, 2, "here", 85, "preempt", 5, 5, "requeued"))
    (node.run_dir / "attempts.jsonl").write_text(line + "\n")
    node.control.mkdir()
    node.says("JobId=42 JobState=RUNNING Reason=None Restarts=0 SubmitTime=1700000000")
    code, err = node.run('touch "$HPCJOBS_CONTROL_DIR/completed"; echo 0 >"$HPCJOBS_CONTROL_DIR/ends/0"')
    assert (code, node.state) == (0, "COMPLETED"), err
    assert (node.control / "continued").read_text().split() == ["42", "1700000000"]
    assert [each["decision"] for each in node.history] == ["resubmitted as 42", "completed"]


def test_of_two_jobs_that_were_submitted_to_continue_another_one_only_one_runs(node: Node) -> None:
    line = encode(Attempt("41", 1, 2, "here", 85, "preempt", 5, 5, "resubmitted as 43"))
    (node.run_dir / "attempts.jsonl").write_text(line + "\n")
    node.control.mkdir()
    (node.control / "continued").write_text("43\n")
    code, err = node.run(f"touch {node.run_dir}/ran")
    assert (code, (node.run_dir / "ran").exists()) == (0, False)
    assert "hpcjobs: job 43 continues in this run folder: nothing is left to do\n" in err
    assert len(node.history) == 1


@pytest.mark.parametrize(
    ("recorded", "continued", "leaves"), [("41", "", True), ("42", "", False), ("41", "42", False)]
)
def test_a_job_whose_request_came_late_leaves_to_the_one_that_is_recorded(
    node: Node, recorded: str, continued: str, leaves: bool
) -> None:
    (node.run_dir / "submitted.json").write_text(json.dumps({"job_id": recorded, "name": "x"}))
    node.control.mkdir()
    (node.control / "continued").write_text(continued)
    code, err = node.run(f"touch {node.run_dir}/ran", HPCJOBS_REQUEST=str(node.run_dir))
    assert (code, (node.run_dir / "ran").exists(), (node.run_dir / "state.json").exists()) == (
        0,
        not leaves,
        not leaves,
    )
    assert ("hpcjobs: the request of this job came late" in err) == leaves


def test_an_attempt_that_lives_on_after_the_next_one_ended_changes_no_record(node: Node) -> None:
    given_up = node.begin(f"cd {node.run_dir}; touch begun; until [ -e end ]; do read -rt 0.1 <> <(:); done; exit 1")
    wait_until((node.run_dir / "begun").exists)
    done = 'touch "$HPCJOBS_CONTROL_DIR/completed"; echo 0 >"$HPCJOBS_CONTROL_DIR/ends/0"'
    code, later_err = node.run(done, SLURM_RESTART_COUNT="1")
    assert (code, node.state) == (0, "COMPLETED"), later_err
    (node.run_dir / "end").touch()
    _, err = given_up.communicate(timeout=60)
    assert (given_up.returncode, node.state) == (1, "COMPLETED"), err
    assert [each["cause"] for each in node.history] == ["preempt", "completed"]
    assert "a later attempt of this job has begun" in err


def test_an_attempt_that_lives_on_after_the_next_one_began_changes_no_record(node: Node) -> None:
    waits = f"touch {node.run_dir}/NAME.begun; until [ -e {node.run_dir}/NAME.end ]; do read -rt 0.1 <> <(:); done; "
    given_up = node.begin(waits.replace("NAME", "first") + "exit 1")  # Slurm lost its node, and started the job anew
    wait_until((node.run_dir / "first.begun").exists)
    done = 'touch "$HPCJOBS_CONTROL_DIR/completed"; echo 0 >"$HPCJOBS_CONTROL_DIR/ends/0"'
    later = node.begin(waits.replace("NAME", "second") + done, SLURM_RESTART_COUNT="1")
    wait_until((node.run_dir / "second.begun").exists)
    history = node.history
    (node.run_dir / "first.end").touch()
    _, err = given_up.communicate(timeout=60)
    after_the_first_end = node.state, node.history
    (node.run_dir / "second.end").touch()
    _, later_err = later.communicate(timeout=60)
    assert (given_up.returncode, after_the_first_end) == (1, ("RUNNING", history)), err
    assert "a later attempt of this job has begun" in err
    assert (later.returncode, node.state) == (0, "COMPLETED"), later_err
    assert [each["cause"] for each in node.history] == ["preempt", "completed"]


def test_a_job_that_cannot_write_its_control_directory_is_held(node: Node) -> None:
    (node.control / "running" / "full").mkdir(parents=True)
    code, err = node.run("exit 0")
    assert code == 1
    assert "Traceback" not in err
    assert "job 42 is held: scontrol release 42" in err
    assert "requeuehold 42" in node.log.read_text()


def test_a_preemption_ends_in_order_where_the_control_directory_cannot_be_written(node: Node) -> None:
    full = 'cd "$HPCJOBS_CONTROL_DIR" && mv running old && mkdir running && touch running/full ready'
    process = node.begin(full + f"; trap 'exit 143' TERM; {AWAIT_SIGNAL}")
    wait_until((node.control / "ready").exists)
    node.says("JobState=COMPLETING Restarts=0 Reason=None")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, node.state) == (143, "CANCELLED")
    assert "Traceback" not in err


def test_no_other_job_continues_a_cancelled_one_that_slurm_has_forgotten(node: Node, tmp_path: Path) -> None:
    """Slurm gave up the node and put the job back, its user cancelled it there, and this attempt ran on."""
    (tmp_path / "bin" / "scontrol").write_text(
        SCONTROL.replace(
            "case", f'[ ! -e {tmp_path}/ended ] || {{ echo "Invalid job id specified" >&2; exit 1; }}\ncase', 1
        )
    )
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/continued\necho 43\n")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    status, err = node.run(f'{SAVED} date +%s >"$HPCJOBS_CONTROL_DIR/cancelled"; touch {tmp_path}/ended; exit 85')
    assert (status, node.state) == (85, "CANCELLED"), err
    assert [each["decision"] for each in node.history] == ["ended: the job was cancelled"]
    assert not (tmp_path / "continued").exists()
