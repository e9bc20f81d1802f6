"""Runs that are told to stop, that nothing moves in, and whose storage fails."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_port
from torch._C import _distributed_c10d

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.signals import JobControl, Stop

from ..conftest import World, await_step, start_rank, worlds_path
from ..ranks import Rank

FLAGS = ("--workload", "faulty:stop_requested", "--log-every", "1", "--steps", "60")


def surviving(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a job that would be started again."""
    (folder / "control").mkdir(parents=True, exist_ok=True)
    return {"PYTHONPATH": worlds_path(), "HPCJOBS_CONTROL_DIR": str(folder / "control"), **more}


@pytest.mark.parametrize(("trainer", "signal"), [("ddp", "SIGUSR1"), ("lightning", "SIGTERM")])
def test_one_rank_is_told_all_save_at_the_same_step_and_the_next_start_has_the_losses_of_a_run_left_alone(
    world: World, tmp_path: Path, trainer: str, signal: str
) -> None:
    alone = world(2, trainer, *FLAGS, env={"PYTHONPATH": worlds_path()}, run_dir="alone")
    message = surviving(tmp_path / "told", ASKED_AT="25", ASKED_BY=signal)
    stopped = world(2, trainer, *FLAGS, env=message, run_dir="told")
    assert stopped.codes == [85, 85], stopped.err
    assert stopped.complaints == []
    (saved,) = checkpoints.steps(stopped.run_dir / checkpoints.FOLDER)
    control = tmp_path / "told" / "control"
    step = int((control / "requeue").read_text())
    assert 20 <= step <= 27
    assert (saved.name, int((control / "steps").read_text())) == (f"step-{step:08d}", step)
    ended = world(2, trainer, *FLAGS, env=surviving(tmp_path / "told"), run_dir="told")
    assert ended.codes == [0, 0], ended.err
    assert ended.summary.resumed_from_step == step
    assert ended.losses() == alone.losses()
    assert ended.summary.evaluation == alone.summary.evaluation


def test_a_signal_after_the_last_step_does_not_make_a_failure_of_a_completed_run(tmp_path: Path) -> None:
    program = (
        "import signal; from hpcjobs.trainers.ddp import main\n"
        "code = main(['--workload', 'lm', '--steps', '1'])\n"
        "print(int(code), signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)"  # others end with the interpreter
    )
    env = {**os.environ, **surviving(tmp_path), "HPCJOBS_RUN_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1:] == ["0 True"], ended


def test_a_run_in_which_nothing_moves_ends_and_names_the_rank_that_the_others_wait_for_by_its_slurm_node(
    world: World, tmp_path: Path
) -> None:
    flags = ("--workload", "faulty:hanging", "--steps", "60", "--stall-after", "3")
    nodes = {rank: {"SLURMD_NODENAME": f"node{rank}"} for rank in range(2)}
    ended = world(2, "ddp", *flags, env=surviving(tmp_path / "run"), env_of=nodes)
    assert 19 in ended.codes
    (message,) = ended.complaints
    assert "behind: rank 1 on node1 " in message
    assert (tmp_path / "run" / "control" / "suspects").read_text().split() == ["node1"]
    assert "(in data of step " in message
    reports = {path.name: path.read_text() for path in (ended.run_dir / "stalled").iterdir()}
    assert reports.keys() == {"rank-0.txt", "rank-1.txt"}
    assert json.loads(reports["rank-1.txt"].splitlines()[0])["phase"] == "data"
    assert 'faulty.py", line' in reports["rank-1.txt"], "the stack shows where"


def test_the_time_left_to_save_is_that_of_the_limit_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_CONTROL_DIR", str(tmp_path))
    monkeypatch.setenv("HPCJOBS_DEADLINE", f"{time.time() + 100:.0f}")
    control, file = JobControl(Stop(), rank=0), tmp_path / "deadline"
    assert 50 < control.left_s < 100
    file.write_text(f"{time.time() + 1000:.0f}\n")
    assert 900 < control.left_s < 1000
    file.write_text(f"{time.time() + 50:.0f}\n")
    assert 0 < control.left_s < 50
    file.write_text("inf\n")
    assert control.left_s == math.inf
    assert JobControl(None, rank=0).left_s == math.inf


PACED = ("--workload", "faulty:paced", "--log-every", "1", "--steps", "140")


def test_a_run_that_was_suspended_for_longer_than_it_may_stand_still_goes_on(tmp_path: Path) -> None:
    """As `scontrol suspend` does it: all processes of the job are stopped."""
    env = {
        "PYTHONPATH": worlds_path(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HPCJOBS_RUN_DIR": str(tmp_path),
    }
    argv = ["hpcjobs.trainers.ddp", *PACED, "--stall-after", "3"]
    ranks = [start_rank(rank, 2, argv, env, tmp_path) for rank in range(2)]
    try:
        first = ranks[0]
        assert isinstance(first, Rank)
        await_step(20, first)
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(6)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs


def test_a_rank_that_goes_on_while_reports_are_gathered_does_not_end_the_run(world: World) -> None:
    ended = world(2, "ddp", *PACED, "--stall-after", "2", env={"PYTHONPATH": worlds_path(), "SLOW_S": "4"})
    assert ended.codes == [0, 0], ended.err
    assert ended.complaints == []
    assert list((ended.run_dir / "stalled").iterdir()) == []


@pytest.mark.skipif(
    not hasattr(_distributed_c10d, "_dump_fr_trace_json"), reason="torch records no collectives of gloo"
)
def test_of_two_ranks_in_the_same_step_the_one_that_began_fewer_collectives_is_behind(world: World) -> None:
    flags = ("--workload", "faulty:stuck", "--steps", "60", "--stall-after", "3", "--no-probe")
    ended = world(2, "ddp", *flags, env={"PYTHONPATH": worlds_path()})
    (message,) = ended.complaints
    assert "behind: rank 1 on " in message
    assert "(in step of step 12, " in message
    waiting, late = (
        [line for line in (ended.run_dir / "stalled" / f"rank-{rank}.txt").read_text().splitlines() if "gloo:" in line]
        for rank in (0, 1)
    )
    assert waiting[-1].endswith(": not ended")
    assert late[-1].endswith(": ended")


@pytest.mark.parametrize("recovers", ["yes", "no"])
def test_storage_that_fails_leaves_the_last_checkpoint_whole_and_the_run_going(
    world: World, tmp_path: Path, recovers: str
) -> None:
    flags = ("--workload", "faulty:vanishing", "--steps", "60", "--log-every", "1", "--checkpoint-every", "9")
    env = {"RECOVERS": recovers, "HPCJOBS_DEADLINE": "1"}  # the deadline is over: the last save is not insisted on
    ended = world(2, "ddp", *flags, env=surviving(tmp_path / "run", **env))
    assert any("not written: " in line for line in ended.complaints), ended.err
    newest, *_ = checkpoints.steps(ended.run_dir / ("checkpoints" if recovers == "yes" else "away"))
    assert checkpoints.damage(newest) is None
    if recovers == "yes":
        assert ended.codes == [0, 0], ended.err
        assert newest.name == "step-00000060"
        assert len(ended.losses()) == 60
    else:
        assert ended.codes[0] == 20, ended.err
        assert newest.name in ("step-00000009", "step-00000018")
        assert any("step 60 can't be saved in" in line for line in ended.complaints)


def test_a_loss_that_is_nan_does_not_lose_the_state_that_the_storage_did_not_take_before(world: World) -> None:
    env = {"PYTHONPATH": worlds_path(), "RECOVERS": "yes"}
    ended = world(1, "ddp", "--workload", "faulty:vanishing_then_nan", "--steps", "60", "--log-every", "1",
                  "--checkpoint-every", "9", "--no-probe", env=env)  # fmt: skip
    assert ended.codes == [13], ended.err
    assert any("not written: " in line for line in ended.complaints), ended.err
    assert (ended.run_dir / "checkpoints" / "latest").resolve().name == "step-00000036"
