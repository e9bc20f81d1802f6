"""`sweep status` reads what changed, not everything."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from commandline import ok
from msgspec.structs import replace
from stub_slurm import install

from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.client import SlurmScheduler

CELLS = 50


@pytest.fixture
def cells(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of a packed sweep's cells, of which 40 have completed."""
    install(monkeypatch, here / "stubs", limit=CELLS)
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    (here / "stub.yaml").write_text(json.dumps({"partitions": partitions, "run_root": "runs"}))
    arguments = ("--site", "./stub.yaml", "--name", "s", "-t", "5m", "--set", f"i=1..{CELLS}", "--pack", "10", "true")
    ok("sweep", *arguments)
    chunk = json.loads(Path("runs/sweep-s/chunks/0001/chunk.json").read_text())
    folders = [Path("runs/sweep-s/cells", cell) for cell in chunk["cells"]]
    for line, folder in enumerate(folders[:40]):
        write_state(folder, "COMPLETED", f"101_{line // 10}")
    return folders


def write_state(folder: Path, state: str, job_id: str, *, restarts: int = 0) -> None:
    folder.mkdir()
    ended = None if state == "RUNNING" else 2.0
    content = {"job_id": job_id, "state": state, "exit_code": 0, "started": 1.0, "ended": ended, "nodes": "a"}
    content["restarts"] = restarts
    (folder / "state.json").write_text(json.dumps(content))


def states() -> object:
    return ok("sweep", "status", "s", "--json").json["states"]


def test_a_completed_cell_is_read_once(cells: list[Path]) -> None:
    """Its file may not even be readable at the second look."""
    assert states() == {"COMPLETED": 40, "PENDING": 10}
    for folder in cells[:40]:
        (folder / "state.json").write_text("not read again")
    write_state(cells[40], "COMPLETED", "101_4")
    assert states() == {"COMPLETED": 41, "PENDING": 9}


def test_a_completed_cell_whose_folder_was_removed_is_no_longer_completed(cells: list[Path]) -> None:
    states()
    shutil.rmtree(cells[0])
    assert states() == {"COMPLETED": 39, "PENDING": 11}


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_cell_whose_task_was_requeued_since_it_failed_runs_again(
    cells: list[Path], monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Its task was preempted, and runs the other cells of it before this one: `resume` would have run it beside.

    Clocks say nothing about it: the node's may be behind that of the controller.
    """
    write_state(Path("runs/sweep-s/chunks/0001/4"), "RUNNING", "101_4", restarts=restarts)
    write_state(cells[40], "CANCELLED", "101_4", restarts=0)
    write_state(cells[41], "FAILED", "101_4", restarts=1)
    waiting = SlurmScheduler.queue

    def run_since_today(scheduler: SlurmScheduler) -> list[JobRecord]:
        return [replace(record, state=State.RUNNING, started=time.time()) for record in waiting(scheduler)]

    monkeypatch.setattr(SlurmScheduler, "queue", run_since_today)
    again = {"CANCELLED": 1, "PENDING": 8} if restarts == 0 else {"PENDING": 9}
    assert states() == {"COMPLETED": 40, "FAILED": 1, **again}


def test_status_reads_no_results(cells: list[Path]) -> None:
    for folder in cells[:40]:
        (folder / "summary.json").mkdir()
    assert states() == {"COMPLETED": 40, "PENDING": 10}
