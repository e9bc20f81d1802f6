"""A script of one's own, by `hpcjobs.runtime.start()`: real processes, alone and in worlds, without Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from waiting import eventually

from hpcjobs.record.summary import RunSummary
from hpcjobs.run.progress import read_progress
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.script_checkpoints import Snapshots, _read_file, write_state
from hpcjobs.runtime.step_log import read_number

FOREIGN = ("SLURM", "PMI", "OMPI", "HOROVOD", "HPCJOBS", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_", "LOCAL_")
SCRIPT = """
import os, signal, sys, time
import hpcjobs.runtime

run = hpcjobs.runtime.start(total_steps=60)
state = run.load() or {"x": 1.0 + run.rank}
saves = {"sharded": "SHARDED" in os.environ}
for step in range(run.step + 1, 61):
    time.sleep(float(os.environ.get("PAUSE", "0.005")))
    state = {"x": state["x"] * 0.9 + 0.01}
    run.log(step, loss=state["x"], tokens=32, norm=2.5)
    if os.environ.get("ASKED_AT") == f"{run.rank}:{step}":
        os.kill(os.getpid(), signal.SIGUSR1)
    if run.should_stop() or step % 20 == 0:
        run.save(step, state, **saves)
    if run.stopping:
        run.leave()
line = f"rank {run.rank} ends with {state['x']} from {run.step} {'torch' in sys.modules}\\n"
os.write(1, line.encode())  # in one piece
run.finish(accuracy=0.5)
"""
KEEPING_PACE = """
    time.sleep(float(os.environ.get("PAUSE", "0.001")))
    (run.run_dir / f"at-{run.rank}").write_text(f"{step}\\n")
    for other in range(run.world_size):
        while not any(int(line) >= step for line in read(run.run_dir / f"at-{other}")):
            time.sleep(0.002)
"""
READ = """
def read(path):
    text = path.read_text() if path.exists() else ""
    return text.split() if text.endswith("\\n") else []
"""
IN_PACE = SCRIPT.replace("\nrun = hpcjobs", f"\n{READ}\nrun = hpcjobs").replace(
    '\n    time.sleep(float(os.environ.get("PAUSE", "0.005")))\n', KEEPING_PACE
)
"""No rank is more than a step ahead of another one, as where gradients are averaged."""


def environment(**more: str) -> dict[str, str]:
    remaining = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**remaining, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def run_script(folder: Path, text: str, *, ranks: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    """The script in ``folder``, alone or as a world of ``ranks`` processes of this machine."""
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, str(script)]
    if ranks > 1:
        command = [sys.executable, "-m", "hpcjobs.runtime.spawn", "--ntasks", str(ranks), "--", *command]
    return subprocess.run(command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=120)


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_steps(run_dir)]


def in_job(folder: Path) -> dict[str, str]:
    """The environment of a job that would be started again."""
    (folder / "control").mkdir(parents=True, exist_ok=True)
    return {
        "HPCJOBS_RUN_DIR": str(folder),
        "HPCJOBS_CONTROL_DIR": str(folder / "control"),
        "MASTER_PORT": str(free_port()),
    }


def test_a_script_alone_writes_what_trainers_write_and_says_once_where(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "train"
    assert done.stdout.count("not started by hpcjobs: files go to") == 1
    assert "torch False" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("from 0 False"), "torch stays unloaded"
    last = read_steps(run_dir)[-1]
    progress = read_progress(run_dir)
    assert progress is not None
    assert (last["step"], progress.of_total, progress.time_left) == (60, "60/60", "0s left")
    assert (last["unit"], last["metrics"]) == ("tokens/s", {"norm": 2.5})
    assert last["throughput"] == pytest.approx(32 / last["step_time_s"])
    summary = RunSummary.read(run_dir)
    assert (summary.status, summary.steps, summary.results) == ("completed", 60, {"norm": 2.5, "accuracy": 0.5})
    assert summary.loss == last["loss"]
    assert summary.throughput is not None
    assert [place.name for place in checkpoints.steps(run_dir / "checkpoints")] == ["step-00000060", "step-00000040"]


@pytest.mark.parametrize(("steps", "first"), [(20, 2), (2, 0)], ids=["many", "two"])
def test_throughput_is_the_work_over_the_time_of_its_steps(tmp_path: Path, steps: int, first: int) -> None:
    """By the script's own stopwatch: without evaluations and the first two steps, if there are more."""
    done = run_script(
        tmp_path,
        f"""
import time
from hpcjobs.runtime import start
run, step_s = start(), []
for step in range(1, {steps} + 1):
    began = time.perf_counter()
    time.sleep(0.03)
    run.log(step, samples=8)
    step_s.append(time.perf_counter() - began)
    with run.exclude_time():
        time.sleep(0.1)
run.finish(rate=8 * len(step_s[{first}:]) / sum(step_s[{first}:]))
""",
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("summary.json")
    summary = RunSummary.read(path.parent)
    assert summary.throughput is not None
    assert summary.results is not None
    assert summary.throughput.value == pytest.approx(summary.results["rate"], rel=0.05)


@pytest.mark.parametrize(("kind", "ranks"), [("one file", 4), ("sharded", 3)])
def test_one_rank_hears_the_signal_all_save_at_the_same_step_and_the_next_start_has_the_same_losses(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    more = {"SHARDED": "yes"} if kind == "sharded" else {}
    alone, reduced = tmp_path / "alone", tmp_path / "asked"
    left_alone = run_script(tmp_path, IN_PACE, ranks=ranks, **in_job(alone), **more)
    assert left_alone.returncode == 0, left_alone.stderr
    stopped = run_script(
        tmp_path, IN_PACE, ranks=ranks, **in_job(reduced), **more, PAUSE="0.06", ASKED_AT=f"{ranks - 1}:21"
    )
    assert stopped.returncode == 85, stopped.stderr
    step = int((reduced / "control" / "requeue").read_text())
    assert 21 <= step < 60
    assert int((reduced / "control" / "steps").read_text()) == step, "nothing is lost"
    assert checkpoints.damage(reduced / "checkpoints" / f"step-{step:08d}") is None
    assert f"after step {step}, saved at step {step}; asks to be started again" in stopped.stdout
    ended = run_script(tmp_path, IN_PACE, ranks=ranks, **in_job(reduced), **more)
    assert ended.returncode == 0, ended.stderr
    assert RunSummary.read(reduced).resumed_from_step == step
    assert read_losses(reduced) == read_losses(alone)
    if kind == "sharded":
        assert sorted(_ends(ended.stdout)) == sorted(_ends(left_alone.stdout)), "each rank has its own state again"


def _ends(out: str) -> list[str]:
    return [line.partition(" from")[0] for line in out.splitlines() if " ends with " in line]


def test_after_a_kill_the_last_checkpoint_counts_and_no_line_is_there_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "train"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(PAUSE="0.1"), stdout=subprocess.DEVNULL
    ) as process:
        eventually(
            lambda: (
                (run_dir / "metrics.jsonl").exists()
                and read_steps(run_dir)[-1:]
                and read_steps(run_dir)[-1]["step"] >= 25
            )
        )
        process.send_signal(signal.SIGKILL)
    ended = run_script(tmp_path, SCRIPT)
    assert "resumed at step 20" in ended.stdout
    assert [step for step, _ in read_losses(run_dir)] == list(range(1, 61))


def test_a_damaged_checkpoint_is_passed_over_and_several_damaged_ones_end_the_start_with_their_code(
    tmp_path: Path,
) -> None:
    run_script(tmp_path, SCRIPT)
    newest, other = checkpoints.steps(tmp_path / "runs" / "train" / "checkpoints")
    (newest / "state.json").write_text("{}")
    again = run_script(tmp_path, SCRIPT)
    assert "passing over the damaged checkpoint step-00000060: state.json has 2 bytes" in again.stdout
    assert "resumed at step 40" in again.stdout
    for place in checkpoints.steps(other.parent):
        (place / "state.json").write_text("{}")
    text = """
import hpcjobs.runtime
try:
    hpcjobs.runtime.start(name="train")
except Exception as error:
    print(error.code, error)
"""
    refused = run_script(tmp_path, text)
    assert refused.stdout.splitlines()[-1].startswith("17 none of 2 checkpoints in ")


def test_a_part_for_another_world_is_refused_and_can_be_read_by_rank(tmp_path: Path) -> None:
    job = in_job(tmp_path / "job")
    assert run_script(tmp_path, SCRIPT, ranks=3, SHARDED="yes", **job).returncode == 0
    text = "import hpcjobs.runtime\nrun = hpcjobs.runtime.start()\nprint(run.load(rank=2)['x'])\nrun.load()"
    alone = run_script(tmp_path, text, **job)
    assert alone.returncode == 17
    assert "has the parts of 3 ranks, and this world has 1. Hint: Run.load(rank=N)" in alone.stderr
    assert "Traceback" not in alone.stderr
    assert float(alone.stdout.splitlines()[-1]) > 0


def test_a_script_that_fails_leaves_a_summary_that_says_why(tmp_path: Path) -> None:
    text = "import hpcjobs.runtime\nrun = hpcjobs.runtime.start()\nrun.log(1, loss=2.0)\nraise KeyError('weights')"
    done = run_script(tmp_path, text)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    summary = RunSummary.read(tmp_path / "runs" / "train")
    assert (summary.status, summary.error, summary.exit_code) == ("failed", "KeyError: 'weights'", 1)
    assert read_losses(tmp_path / "runs" / "train") == [(1, 2.0)]


def test_finish_after_a_stop_is_no_end(tmp_path: Path) -> None:
    text = SCRIPT.replace("        run.leave()\n", "        break\n")
    done = run_script(tmp_path, text, **in_job(tmp_path / "job"), ASKED_AT="0:30")
    assert done.returncode == 85, done.stderr
    assert not (tmp_path / "job" / "summary.json").exists()
    assert (tmp_path / "job" / "control" / "requeue").read_text() == "30\n"


def test_a_rank_that_stands_still_ends_the_run_and_is_named(tmp_path: Path) -> None:
    text = SCRIPT.replace("state = run.load()", "run.watch(after_s=1.5)\nstate = run.load()").replace(
        "    run.log(step", "    while run.rank == 1 and step == 30: time.sleep(1)\n    run.log(step"
    )
    text = text.replace("run.should_stop() or", "step == 31 and time.sleep(60) or")
    done = run_script(tmp_path, text, ranks=2, **in_job(tmp_path / "job"), SLURMD_NODENAME="node7")
    assert done.returncode == 19, done.stderr
    assert "behind: rank 1 on node7 (in step of step 30, " in done.stderr
    report = (tmp_path / "job" / "stalled" / "rank-1.txt").read_text()
    assert 'train.py", line' in report


def test_what_is_no_number_is_refused_by_its_key() -> None:
    torch = pytest.importorskip("torch")
    assert read_number("loss", torch.tensor(1.5, requires_grad=True)) == 1.5
    assert read_number("flag", True) is True
    with pytest.raises(TypeError, match=r"log\(\): loss is a str \('high'\), expected a number"):
        read_number("loss", "high")
    with pytest.raises(TypeError, match=r"log\(\): norms is a tensor of shape \(3,\), expected one number"):
        read_number("norms", torch.ones(3))
    with pytest.raises(TypeError, match=r"log\(\): lr is a NoneType \(None\), expected a number"):
        read_number("lr", None)


def test_a_state_is_written_in_the_plainest_format_that_gives_it_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    states: dict[str, Any] = {
        ".json": {"step": 3, "names": ["a", "b"], "rate": 1e-3, "none": None},
        ".pkl": {"pair": (1, 2), 3: "three"},
        ".pt": {"weights": torch.arange(3.0), "other": (1, {"deep": torch.ones(2)})},
    }
    for suffix, state in states.items():
        snapshot = Snapshots().take(state)
        assert write_state(tmp_path / suffix[1:], snapshot).suffix == suffix
        assert str(_read_file(tmp_path / suffix[1:])) == str(state)
    with pytest.raises(TypeError, match=r"save\(\): the state can't be written"):
        Snapshots().take({"function": lambda: None})


def test_a_snapshot_does_not_change_with_the_state() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.zeros(2)
    taken = Snapshots().take({"weights": weights})
    weights += 1
    assert taken.content["weights"].tolist() == [0, 0]


def test_a_run_is_begun_once_in_a_program(tmp_path: Path) -> None:
    text = "import hpcjobs.runtime\nhpcjobs.runtime.start()\nhpcjobs.runtime.start()"
    done = run_script(tmp_path, text)
    assert done.returncode == 2
    assert "error: rank 0: hpcjobs.runtime.start() was called before" in done.stderr


def test_a_world_of_another_size_than_the_job_requested_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import hpcjobs.runtime\nhpcjobs.runtime.start()", HPCJOBS_NTASKS="4")
    assert "the job asked for 4 ranks (HPCJOBS_NTASKS), but the world that started has 1" in done.stderr
