"""An array of 1,000 running tasks on the screen: what a refresh asks and what it costs. Slurm is a recorded answer."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import msgspec
import pytest
from screens import wait_until_drawn
from scripted_slurm import answer
from slurm_rows import queued_row

from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.top.look import Looker, RealActions
from hpcjobs.top.screen import JobTable, TopScreen

TASKS, REFRESHES = 1000, 6


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster on which all tasks of an array of ours run and write metrics; the folder of its commands."""
    conf, sites = tmp_path / "slurm.conf", Path.home() / ".config" / "hpcjobs" / "site_configs"
    conf.touch()
    sites.mkdir(parents=True)
    (sites / "mine.yaml").write_text(
        f"{{partitions: {{batch: {{nodes: 2, node: {{cpus: 4}}}}}}, slurm_conf: {conf}}}\n"
    )
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    run_dir = here / "runs" / "train-7"
    run_dir.mkdir(parents=True)
    submitted, array = time.time() - 60, f"0-{TASKS - 1}"
    entry = Entry("7", "train", "mine", "slurm", str(run_dir), submitted, array=array, slurm_conf=str(conf))
    (run_dir / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    lines = [{"kind": "run", "total_steps": 400}]
    lines += [{"kind": "step", "step": n, "loss": 5 - n / 25, "throughput": 139, "time_s": n} for n in range(1, 101)]
    for task in range(TASKS):
        folder = run_dir / str(task)
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    commands = tmp_path / "slurm"
    commands.mkdir()
    own = {"JobName": "train", "Partition": "batch", "Command": run_dir / "job.sh"}
    rows = (queued_row(JobID=f"7_{task}", **own) for task in range(TASKS))
    (commands / "rows").write_text("".join(f"{row}\n" for row in rows))
    answer(commands, "squeue", f"cat {commands}/rows")
    for command in ("sacct", "scontrol"):
        answer(commands, command, ":")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return commands


def test_a_refresh_of_a_thousand_unfolded_tasks_is_one_question_and_takes_less_than_a_second(slurm: Path) -> None:
    looker = Looker()
    app = TopScreen(looker, looker.look(), RealActions())
    costs: list[float] = []

    async def run() -> None:
        async with app.run_test(size=(160, 50)) as pilot:
            await pilot.press("enter")
            await wait_until_drawn(pilot)
            for _ in range(REFRESHES):
                began, questions = time.process_time(), count(slurm, "squeue")
                await pilot.press("r")
                await wait_until_drawn(pilot)
                costs.append(time.process_time() - began)
                assert count(slurm, "squeue") == questions + 1
            table = app.query_one(JobTable)
            assert len(table.jobs) == 1 + TASKS
            await pilot.press("end")
            assert table.chosen is not None
            assert (table.chosen.job, table.chosen.share) == (f"7_{TASKS - 1}", 0.25)

    asyncio.run(run())
    assert statistics.median(costs) < 1, costs  # CPU time: the machine may be busy
    assert [count(slurm, command) for command in ("sacct", "scontrol")] == [0, 0]


def count(slurm: Path, command: str) -> int:
    """How often ``command`` was run."""
    path = slurm / f"{command}.asked"
    return len(path.read_text().splitlines()) if path.exists() else 0
