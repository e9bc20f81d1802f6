"""`hpcjobs top` on jobs of a real Slurm: in a terminal at two sizes, with its keys, and what a refresh asks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import ok
from tmux import Terminal
from waiting import eventually

from hpcjobs.record.metrics import MetricsLog
from hpcjobs.sandbox import Sandbox
from hpcjobs.scheduler.base import State
from hpcjobs.top.look import Looker

TASKS, TRAININGS = 56, ("first", "second")
REFRESHES = 5


def submit(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = ok("submit", "--site", "tu-hpc", "--time", "10m", "--json", *arguments).json
    return answer


def slurm(sandbox: Sandbox, *argv: str) -> str:
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def questions(sandbox: Sandbox) -> Counter[str]:
    """How often the controller was asked about jobs since it started, by the kind of the question."""
    by_kind = slurm(sandbox, "sdiag").split("Remote Procedure Call statistics by user")[0]
    counts = re.findall(r"^\s*(REQUEST_JOB\w*INFO\w*)\s.*count:(\d+)", by_kind, re.MULTILINE)
    return Counter({kind: int(count) for kind, count in counts})


@pytest.fixture
def jobs(sandbox: Sandbox, workdir: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """By name: an array of which all tasks run, two trainings, as far as their files say, and a job that has failed."""
    for name, text in (("wait", "echo a line of the log\nuntil [ -e go ]; do sleep 1; done"), ("fail", "exit 3")):
        program = workdir / f"{name}.sh"
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    submitted = {"failing": submit("--name", "failing", "./fail.sh")}
    submitted |= {name: submit("--name", name, "./wait.sh") for name in TRAININGS}
    submitted["many"] = submit("--name", "many", "--array", f"0-{TASKS - 1}", "./wait.sh")
    ids = ",".join(job["job_id"] for job in submitted.values())
    try:
        queue = ("squeue", "-h", "-r", "-o", "%T", "-j", ids)
        eventually(lambda: slurm(sandbox, *queue).split() == ["RUNNING"] * (TASKS + len(TRAININGS)), timeout_s=500)
        for name in TRAININGS:
            log = MetricsLog(Path(submitted[name]["run_dir"]) / "metrics.jsonl")
            log.write("run", total_steps=400)
            for step in range(10, 101, 10):
                log.write("step", step=step, epoch=0, loss=5 - step / 25, throughput=139, unit="tokens/s", time_s=step)
            log.close()
        yield submitted
    finally:
        slurm(sandbox, "scancel", *ids.split(","))


def choose(terminal: Terminal, text: str, shown: str) -> None:
    """Show only what contains ``text``. A key that follows Escape at once would be taken for Alt and that key."""
    eventually(lambda: " running" in terminal.first_line)
    if "filter: " in terminal.first_line:
        terminal.press("Escape")
        eventually(lambda: re.match(r"\d", terminal.first_line))
    terminal.press("/")
    terminal.await_text("Enter keeps the filter")
    terminal.press("-l", text)
    terminal.await_text(f"filter: {text}", shown)
    terminal.press("Enter")
    eventually(lambda: text not in map(str.strip, terminal.text.splitlines()))  # where it was typed


def drive(terminal: Terminal, jobs: dict[str, dict[str, Any]], training: str) -> None:
    """Look at all jobs; read the log of a training, change its time limit, cancel it; why another one failed."""
    array, job = jobs["many"]["job_id"], jobs[training]["job_id"]

    terminal.start(sys.executable, "-m", "hpcjobs", "top", "--site", "tu-hpc")
    terminal.await_text(f"{TASKS}R", "25%", "RUNNING", "FAILED", "exit co", "q Quit")
    choose(terminal, "many", f"{array}  many on tu-hpc  {TASKS} RUNNING")
    assert f"{array}_0" not in terminal.text
    terminal.press("Enter")
    terminal.await_text(f"  {array}_0", f"  {array}_1 ")
    terminal.press("End")
    terminal.await_text(f"{array}_{TASKS - 1}  many on tu-hpc  RUNNING")
    terminal.press("Enter")
    terminal.await_text(f"{TASKS} RUNNING")

    choose(terminal, training, f"{job}  {training} on tu-hpc  RUNNING")
    terminal.await_text("step 100 of 400", " of 10m00s")
    ok("update", job, "time=20m")
    terminal.press("r")
    terminal.await_text(" of 20m00s")
    terminal.press("l")
    terminal.await_text(f"log of {job} {training}", "a line of the log")
    terminal.press("Escape")
    terminal.await_text("q Quit")
    choose(terminal, "failing", "FAILED")
    terminal.press("w")
    terminal.await_text("cause:", "exit code 3")
    terminal.press("q")
    terminal.await_text("q Quit")
    choose(terminal, training, f"{job}  {training} on tu-hpc  RUNNING")
    terminal.press("c")
    terminal.await_text(f"Cancel job {job} ({training})?")
    terminal.press("y")
    terminal.await_text(f"cancelled {job}", "CANCELLED")


def test_jobs_are_seen_read_explained_and_cancelled_at_two_sizes_and_a_refresh_is_one_question(
    jobs: dict[str, dict[str, Any]], sandbox: Sandbox, tmp_path: Path
) -> None:
    looker = Looker(site="tu-hpc")
    looker.look()
    before = questions(sandbox)
    durations: list[float] = []
    for _ in range(REFRESHES):
        began = time.process_time()
        snapshot = looker.look()
        durations.append(time.process_time() - began)
    assert sum((questions(sandbox) - before).values()) == REFRESHES, questions(sandbox) - before
    assert sum(task.record.state is State.RUNNING for task in snapshot.tasks) == TASKS + len(TRAININGS)
    assert min(durations) < 1, durations

    array = jobs["many"]["job_id"]
    for training, size in zip(TRAININGS, ((80, 24), (160, 50)), strict=True):
        folder = tmp_path / training
        folder.mkdir()
        terminal = Terminal(folder, *size)
        try:
            drive(terminal, jobs, training)
            if training == TRAININGS[-1]:
                choose(terminal, "many", f"{TASKS} RUNNING")
                terminal.press("c")
                terminal.await_text(f"Cancel {TASKS} tasks of {array} (many)?")
                terminal.press("y")
                terminal.await_text(f"cancelled {array}", f"{TASKS} CANCELLED")
            terminal.press("q")
            assert terminal.await_exit() == 0
        finally:
            terminal.end()
