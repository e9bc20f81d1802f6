"""The notebooks run as they are, on this machine, and are kept with what they show."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST_BYTES = 200_000


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def pictures(cells: list[dict[str, Any]]) -> list[bytes]:
    shown = [output.get("data", {}).get("image/png") for cell in cells for output in cell["outputs"]]
    return [base64.b64decode(picture) for picture in shown if picture]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path: Path, here: Path) -> None:
    for file in (path, *FOLDER.glob("*.py")):
        shutil.copy(file, here)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", path.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(pictures(code_cells(here / path.name))) == len(pictures(code_cells(path)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_what_it_shows_and_nothing_of_the_machine(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(cells))
    assert pictures(cells)
    assert path.stat().st_size < LARGEST_BYTES
    assert not re.search(r"/(home|root|tmp|work|var)/", json.dumps([cell["outputs"] for cell in cells]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_another_site_is_one_name_away(path: Path) -> None:
    printed_lines = [
        line for cell in code_cells(path) for line in "".join(cell["source"]).splitlines() if '"local"' in line
    ]
    assert len(printed_lines) == 1
    assert printed_lines[0].startswith('SITE = "local"')


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_first_job", "02_sweep", "03_scaling_report"]
