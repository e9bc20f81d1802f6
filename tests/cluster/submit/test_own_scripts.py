"""The script of docs/own_scripts.md on a real Slurm, under three launchers, stopped once and killed once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from login_node import Cluster, Submitted
from waiting import eventually

PAGE = Path(__file__).parents[3] / "docs" / "own_scripts.md"
LAUNCHERS = ("srun", "torchrun", "mpirun")
KILL_ONCE = """
    once = run.run_dir / "killed"
    if step == 70 and run.rank == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.25 if "HPCJOBS_JOB_ID" in os.environ else 0)
"""


def read_example() -> str:
    """The page's script, at a pace at which it can be met, and with one kill."""
    text = re.search(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    lines = text[1].replace("import torch\n", "import os, signal, time\nimport torch\n", 1)
    assert lines.count("    optimizer.step()\n") == 1
    return lines.replace("    optimizer.step()\n", f"    optimizer.step(){KILL_ONCE}")


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def read_history(job: Submitted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]


def count_steps(job: Submitted) -> int:
    place = job.run_dir / "control" / "steps"
    return int(place.read_text() or 0) if place.exists() else 0


def run_by_hand(cluster: Cluster, script: str) -> list[tuple[int, float]]:
    """The losses of the script, started by torchrun and left alone."""
    alone = cluster.folder / "alone"
    alone.mkdir()
    (alone / "runs" / "train").mkdir(parents=True)
    (alone / "runs" / "train" / "killed").touch()  # this one is left alone
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    by_hand = subprocess.run(
        [*torchrun, str(cluster.folder / script)], cwd=alone, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stderr
    expected = read_losses(alone / "runs" / "train")
    assert [step for step, _ in expected] == list(range(1, 101))
    return expected


def test_the_same_script_has_the_same_losses_under_three_launchers_stopped_and_killed_as_by_torchrun_left_alone(
    cluster: Cluster,
) -> None:
    script = cluster.program("train.py", read_example())
    paced = ("--retries", "on", "-N", "2", "-t", "10m")
    jobs = {name: cluster.submit(*paced, "--launcher", name, script) for name in LAUNCHERS}
    waiting = dict(jobs)

    def all_are_told_to_end() -> bool:
        for name in [name for name, job in waiting.items() if count_steps(job) >= 5]:
            cluster.slurm("scancel", "--batch", "--signal=USR1", waiting.pop(name).id)
        return not waiting

    eventually(all_are_told_to_end, timeout_s=240)

    expected = run_by_hand(cluster, script)
    for name, job in jobs.items():
        job.done()
        first, *others = read_history(job)
        assert (first["cause"], first["decision"]) == ("preempt", "requeued"), (name, first, job.log)
        assert first["steps"] == first["saved"], "the end was announced: nothing is lost"
        assert others[-1]["cause"] == "completed", (name, others)
        assert (job.run_dir / "killed").exists()
        assert read_losses(job.run_dir) == expected, name
    shown = cluster.hpcjobs("show", jobs["srun"].id).out
    assert "steps: 100" in shown, shown


@pytest.mark.long
def test_a_script_that_meets_its_time_limit_loses_no_step_under_three_launchers(cluster: Cluster) -> None:
    """A real limit, of two minutes: the script needs longer than that."""
    slow = read_example().replace("time.sleep(0.25 if", "time.sleep(1.5 if")
    script = cluster.program("train.py", slow.replace("if step == 70 and", "if False and"))
    limited = ("--retries", "on", "-N", "2", "-t", "2m", "--signal-before", "40s")
    jobs = {name: cluster.submit(*limited, "--launcher", name, script) for name in LAUNCHERS}
    expected = run_by_hand(cluster, script)
    for name, job in jobs.items():
        answer = job.wait(timeout_s=1500)
        assert answer.code == 0, (answer, job.log)
        *stopped, last = read_history(job)
        assert stopped, name
        for attempt in stopped:
            assert (attempt["cause"], attempt["decision"]) == ("timeout", "requeued"), (name, attempt, job.log)
            assert attempt["steps"] == attempt["saved"], (name, attempt)
        assert (last["cause"], last["steps"]) == ("completed", 100), (name, last)
        assert read_losses(job.run_dir) == expected, name
