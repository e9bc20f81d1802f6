"""The notebooks on a cluster, with no more than the name of its site changed: minutes, so `make long` runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[3] / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_cluster(path: Path, sandbox: object, workdir: Path) -> None:
    for file in path.parent.glob("*.py"):
        shutil.copy(file, workdir)
    text = path.read_text(encoding="utf-8").replace('SITE = \\"local\\"', 'SITE = \\"tu-hpc\\"')
    assert "tu-hpc" in text
    (workdir / path.name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", path.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
