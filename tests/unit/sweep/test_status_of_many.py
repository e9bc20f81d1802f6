"""`sweep status` reads what changed, not everything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commandline import ok
from stub_slurm import install

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


def write_state(folder: Path, state: str, job_id: str) -> None:
    folder.mkdir()
    content = {"job_id": job_id, "state": state, "exit_code": 0, "started": 1.0, "ended": 2.0, "nodes": "a"}
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


def test_status_reads_no_results(cells: list[Path]) -> None:
    for folder in cells[:40]:
        (folder / "summary.json").mkdir()
    assert states() == {"COMPLETED": 40, "PENDING": 10}
