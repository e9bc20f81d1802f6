"""Budgets as they are said, and what the script does with them: it runs here, with stubs for a cluster's programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commandline import ok
from scripts_here import planned, run_here

from hpcjobs.errors import RequestError
from hpcjobs.site.models import UNLIMITED, Retries, parse_retries

LEAVES = """
import sys
from hpcjobs.runtime import signals
signals.write_number(signals.STEPS, int(sys.argv[2]))
signals.leave(int(sys.argv[1]))
"""

UNREAD = """
import os, pathlib, signal, sys, time

def stat(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

control, ranks = pathlib.Path(os.environ["HPCJOBS_CONTROL_DIR"]), int(os.environ["WORLD_SIZE"])
launcher = int(stat(os.getppid())[1])
if os.environ["RANK"] == "0":
    while len(list(control.glob("ready-*"))) < ranks - 1:
        time.sleep(0.01)
    script = int(stat(launcher)[1])
    os.kill(script, signal.SIGSTOP)  # it would collect its child
    os.kill(launcher, signal.SIGKILL)
    if os.fork() == 0:
        while len(list((control / "ends").iterdir())) < ranks:
            time.sleep(0.01)
        os.kill(script, signal.SIGCONT)
        os._exit(0)
else:
    (control / ("ready-" + os.environ["RANK"])).touch()
while stat(launcher)[0] != "Z":
    time.sleep(0.01)
sys.exit(1)
"""


def test_what_is_named_changes_the_defaults_and_nothing_else() -> None:
    assert parse_retries("on") == Retries(timeout=UNLIMITED, preempt=UNLIMITED, node=3, error=0)
    assert parse_retries("node=5, timeout=2") == Retries(timeout=2, node=5)
    assert parse_retries("error=inf") == Retries(error=UNLIMITED)
    assert parse_retries("off") is None
    assert str(Retries()) == "timeout=∞,preempt=∞,node=3,error=0"


@pytest.mark.parametrize("text", ["often", "node", "node=-1", "nodes=3", "node=3.5", "", "on,off"])
def test_other_words_are_refused_with_the_known_ones(text: str, here: Path) -> None:
    with pytest.raises(RequestError, match="retries"):
        planned("sandbox", "srun", "true", retries=text)


def test_a_lead_beyond_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match=r"signal_before=600 s .flag.: no shorter than time=00:10:00"):
        planned("sandbox", "srun", "true", retries="on", signal_before="10m", time="10m")


def test_slurm_is_asked_to_requeue_and_to_warn_the_script() -> None:
    script = planned("sandbox", "srun", "true", retries="on", signal_before="2m").script
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --signal=B:USR1@120\n" in script
    assert "--signal" not in planned("sandbox", "srun", "true").script


@pytest.mark.parametrize(("time", "before"), [("2h", 300), ("20m", 300), ("5m", 75), ("10s", 2)])
def test_the_signal_of_a_short_limit_does_not_come_as_the_job_begins(time: str, before: int) -> None:
    assert f"#SBATCH --signal=B:USR1@{before}\n" in planned("sandbox", "srun", "true", retries="on", time=time).script


def test_a_world_that_may_shrink_needs_an_elastic_launcher_and_retries() -> None:
    with pytest.raises(RequestError, match="srun cannot continue with fewer nodes"):
        planned("sandbox", "srun", "true", retries="on", nodes=3, min_nodes=2)
    with pytest.raises(RequestError, match="it needs --retries"):
        planned("sandbox", "torchrun", "true", nodes=3, min_nodes=2)
    with pytest.raises(RequestError, match="min_nodes=3 must be less than nodes=3"):
        planned("sandbox", "torchrun", "true", retries="on", nodes=3, min_nodes=3)
    script = planned("sandbox", "torchrun", "true", retries="on", nodes=3, min_nodes=2).script
    assert "#SBATCH --no-kill\n" in script
    assert '--nnodes="2:$HPCJOBS_NNODES"' in script
    assert "--no-kill --kill-on-bad-exit=0" in script
    own_store = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"  # else ranks meet the entries of an earlier start
    assert own_store in script
    assert own_store not in planned("sandbox", "torchrun", "true", nodes=3).script


class Script:
    """A job with retries, started as often as a test likes."""

    def __init__(self, tmp_path: Path, here: Path) -> None:
        self.place, self.here, self.starts = tmp_path, here, 0
        self.run_dir = tmp_path / "run"

    def start(self, *arguments: str, program: str = LEAVES) -> subprocess.CompletedProcess[str]:
        (self.here / "leaves.py").write_text(program)
        plan = planned("sandbox", "srun", "leaves.py", *arguments, retries="on")
        self.starts += 1
        folder = self.place / f"start-{self.starts}"
        folder.mkdir()
        self.run_dir.mkdir(exist_ok=True)
        (folder / "run folder").symlink_to(self.run_dir)
        return run_here(plan, folder)

    @property
    def state(self) -> str:
        return str(json.loads((self.run_dir / "state.json").read_text())["state"])

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "attempts.jsonl").read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path, here: Path) -> Script:
    return Script(tmp_path, here)


def test_a_program_that_advances_is_requeued_and_one_that_has_done_nothing_more_is_in_the_end_not(
    script: Script,
) -> None:
    for _ in range(4):
        done = script.start("7", "9")
    assert [line["decision"].split(":")[0] for line in script.history] == ["requeued"] * 3 + ["ended"]
    assert [(line["cause"], line["steps"], line["saved"]) for line in script.history] == [("preempt", 9, 7)] * 4
    assert (done.returncode, script.state) == (85, "FAILED")
    assert "no progress, 7 is still all that is saved" in done.stderr


def test_a_program_that_fails_ends_with_its_code_and_one_that_is_killed_is_tried_again(script: Script) -> None:
    done = script.start(program="import os; os.kill(os.getpid(), 9)")
    assert (script.state, script.history[-1]["cause"]) == ("REQUEUED", "node"), done
    done = script.start(program="raise SystemExit(7)")
    assert (done.returncode, script.state) == (7, "FAILED")
    assert script.history[-1]["decision"] == "ended: the budget error=0 is spent"


def test_ranks_that_fail_since_the_reader_of_their_output_is_dead_are_tried_again_also_if_nobody_collects_it(
    script: Script,
) -> None:
    done = script.start(program=UNREAD)
    assert (script.state, script.history[-1]["cause"]) == ("REQUEUED", "node"), done


def test_an_attempt_that_left_no_word_is_in_the_history_of_the_next_one(script: Script) -> None:
    script.start("7", "9")
    (script.run_dir / "control" / "running").write_text('{"job_id": "7", "started": 1700000000, "nodes": "node[1-2]"}')
    script.start(program="pass")
    assert [line["decision"] for line in script.history] == ["requeued", "requeued by Slurm", "completed"]
    assert script.state == "COMPLETED"


@pytest.mark.parametrize(("code", "state"), [(85, "REQUEUED"), (0, "COMPLETED")])
def test_how_a_rank_ended_is_recorded_where_the_run_folder_is_away_for_a_moment(
    script: Script, code: int, state: str
) -> None:
    program = f"""
import os, subprocess, sys
control = os.environ["HPCJOBS_CONTROL_DIR"]
if os.environ["RANK"] == "0":
    open(control + "/progress", "w").write("3")
    os.rename(control, control + ".away")
    subprocess.Popen(["bash", "-c", 'sleep 0.5; mv "$0.away" "$0"', control])
sys.exit({code})
"""
    done = script.start(program=program)
    assert script.state == state, done.stderr
    assert "cannot be written" not in done.stderr


@pytest.mark.parametrize(("mode", "partition"), [("cancel", "cheap"), ("requeue", "cheap"), ("cancel", "usual")])
def test_a_partition_that_cancels_preempted_jobs_is_named_where_they_are_to_start_again(
    mode: str, partition: str, here: Path
) -> None:
    node = "nodes: 2\n    node: {cpus: 8}"
    Path("mine.yaml").write_text(
        f"partitions:\n  usual:\n    {node}\n  cheap:\n    {node}\n    preemptible: {mode}\ndefaults: {{time: 1h}}\n"
    )
    arguments = ("submit", "--site", "./mine.yaml", "--dry-run", "-p", partition)
    note = "partition cheap cancels a job whose nodes others need"
    assert (note in ok(*arguments, "--retries", "on", "true").err) == ((mode, partition) == ("cancel", "cheap"))
    assert note not in ok(*arguments, "true").err
