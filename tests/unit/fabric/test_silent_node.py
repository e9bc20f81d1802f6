"""A check whose own first node never starts its script: nobody is there to look at the others."""

from __future__ import annotations

from pathlib import Path

from hpcjobs.run.fabric import silent_first_node
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
