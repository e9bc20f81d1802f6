"""A check whose own first node never starts its script: nobody is there to look at the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commandline import await_answer, start
from scripted_slurm import answer
from slurm_rows import print_rows, queued_row

from hpcjobs.cli.fabric import silent_first_node
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State


class Queue:
    """A scheduler that shows one job, in a state that changes as time goes by."""

    def __init__(self, run_dir: Path, *states: State, begins_at: float = 1e9) -> None:
        self.now, self.queries, self.run_dir = 0.0, 0, run_dir
        self.states, self.begins_at = states, begins_at

    def queue(self) -> list[JobRecord]:
        self.queries += 1
        state = self.states[min(self.queries, len(self.states)) - 1]
        nodes = None if state is State.PENDING else "tu[02-04]"
        return [JobRecord(job_id="7", state=state, source="squeue", node_list=nodes)]

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.begins_at:
            (self.run_dir / "state.json").touch()

    def silent(self) -> str | None:
        entry = Entry(job_id="7", name="fabric", site="s", scheduler="slurm", run_dir=str(self.run_dir), submitted=0)
        return silent_first_node(entry, connect=lambda *_: self, clock=lambda: self.now, pause=self.pause)  # type: ignore[arg-type,return-value]


def test_a_job_that_runs_and_says_nothing_names_its_first_node_within_a_minute(tmp_path: Path) -> None:
    queue = Queue(tmp_path, State.RUNNING, State.PENDING)  # put back by Slurm, to the same node
    assert queue.silent() == "tu02"
    assert queue.now < 60


def test_a_job_that_waits_in_the_queue_is_waited_for_and_asked_about_seldom(tmp_path: Path) -> None:
    queue = Queue(tmp_path, *[State.PENDING] * 40, State.RUNNING, begins_at=620)
    assert queue.silent() is None
    assert queue.queries <= 620 / 15 + 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_whoever_interrupts_a_check_that_waits_reads_that_its_job_goes_on(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    commands = tmp_path / "slurm"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (here / "mine.yaml").write_text("{partitions: {batch: {nodes: 2, node: {cpus: 4}}}}\n")
    job = {"JobID": 41, "JobName": "fabric", "State": "PENDING", "Reason": "Resources", "Partition": "batch"}
    row = queued_row(**job, NNodes=2, Submit="$(date +%s)", TimeLimit="5:00")
    answer(commands, "sbatch", "echo 41")
    answer(commands, "squeue", print_rows(row))
    check = start("fabric", "--site", "./mine.yaml", *options)
    assert check.stderr is not None
    assert check.stderr.readline().startswith("hpcjobs: job 41 on site mine")
    check.send_signal(signal.SIGINT)
    answered = await_answer(check, timeout_s=100)
    assert answered.code == 130
    assert "job 41 continues: `hpcjobs wait 41` waits again, `hpcjobs cancel 41` cancels" in answered.err
