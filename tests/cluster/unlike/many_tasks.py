"""`hpcjobs top` and an array of which a thousand tasks run: what a refresh asks slurmctld, and how long it takes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok
from screens import wait_until_drawn
from tmux import Terminal
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Shape
from hpcjobs.top.look import Looker, RealActions
from hpcjobs.top.screen import JobTable, TopScreen

TASKS, REFRESHES = int(os.environ.get("TASKS", "1000")), 10
SITE = "partitions: {cpu: {nodes: 4, node: {cpus: 250, mem: 64G}, max_time: 2h}}\n"
# The gatherer of each step reads all of /proc every second, and a thousand of them leave nothing of two cores.
SETTINGS = {"JobAcctGatherType": "jobacct_gather/none"}
"""So that a thousand tasks fit on this machine."""

TASK = """\
#!/bin/bash
#SBATCH --ntasks=1
cat >"$HPCJOBS_RUN_DIR/metrics.jsonl" <<.
{"kind": "run", "total_steps": 400}
{"kind": "step", "step": 100, "loss": 4.2, "throughput": 139, "unit": "tokens/s", "time_s": 10}
.
exec sleep 7200
"""


@pytest.fixture
def conf(workdir: Path) -> Iterator[str]:
    """slurm.conf of a sandbox whose nodes claim a thousand cores."""
    site = workdir / "site_configs" / "ours.yaml"
    site.parent.mkdir()
    site.write_text(SITE)
    try:
        yield sandboxes.up(Shape(like=str(site), settings=SETTINGS)).slurm_conf
    finally:
        sandboxes.down()


def slurm(conf: str, *argv: str) -> str:
    env = {**os.environ, "SLURM_CONF": conf}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout


def questions(conf: str) -> Counter[str]:
    """How often slurmctld was asked about jobs since it started, by the kind of the question."""
    by_kind = slurm(conf, "sdiag").split("Remote Procedure Call statistics by user")[0]
    counts = re.findall(r"^\s*(REQUEST_JOB\w*INFO\w*)\s.*count:(\d+)", by_kind, re.MULTILINE)
    return Counter({kind: int(count) for kind, count in counts})


@pytest.mark.timeout(1800)
def test_a_refresh_of_a_thousand_running_tasks_is_one_question_and_takes_less_than_a_second(
    conf: str, workdir: Path, tmp_path: Path
) -> None:
    script = workdir / "task.sh"
    script.write_text(TASK)
    began = time.monotonic()
    arguments = ("--site", "ours", "--mem", "1M", "--array", f"0-{TASKS - 1}", "--name", "many")
    run_dir = Path(ok("submit", *arguments, "--json", str(script)).json["run_dir"])
    eventually(lambda: len(list(run_dir.glob("*/state.json"))) == TASKS, timeout_s=1200)
    queue = ("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i")
    eventually(lambda: len(slurm(conf, *queue).split()) == TASKS)
    print(f"{TASKS} tasks run after {time.monotonic() - began:.0f} s")

    looker, costs = Looker(site="ours"), []
    first = looker.look()
    before = questions(conf)
    for _ in range(REFRESHES):
        wall, cpu = time.monotonic(), time.process_time()
        looker.look()
        costs.append((time.monotonic() - wall, time.process_time() - cpu))
    counts = questions(conf) - before
    print(f"{REFRESHES} looks: {dict(counts)}; wall and CPU seconds of each: {costs}")
    assert sum(counts.values()) == REFRESHES, counts
    assert min(wall for wall, _ in costs) < 1

    terminal = Terminal(tmp_path, 160, 50)
    try:
        terminal.start(sys.executable, "-m", "hpcjobs", "top", "--site", "ours")
        terminal.await_text(f"{TASKS}R")
        terminal.press("Enter")
        terminal.await_text("25%", "139 tokens/s")
        terminal.press("q")
        assert terminal.await_exit() == 0
    finally:
        terminal.end()
    app = TopScreen(looker, first, RealActions())
    asyncio.run(refresh(app, conf))


async def refresh(app: TopScreen, conf: str) -> None:
    """Unfold the array, and refresh the screen some times."""
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.press("enter")
        await wait_until_drawn(pilot)
        costs = []
        before = questions(conf)
        for _ in range(REFRESHES):
            wall, cpu = time.monotonic(), time.process_time()
            await pilot.press("r")
            await wait_until_drawn(pilot)
            costs.append((time.monotonic() - wall, time.process_time() - cpu))
        counts = questions(conf) - before
        print(f"{REFRESHES} refreshes of the unfolded screen: {dict(counts)}; wall and CPU seconds of each: {costs}")
        assert len(app.query_one(JobTable).jobs) == 1 + TASKS
        assert sum(counts.values()) == REFRESHES, counts
        assert min(wall for wall, _ in costs) < 1
