"""`make test` tries what failed once more, alone, and only forgives what passes then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("cluster/jupyter", "cluster/submit", "cluster", "docs", "unit/trainers", "unit/horovod", "unit"),
    *("simulation", "figures", "packaging"),
)
PASSES = "def test_{name}():\n    pass\n"
FLAKY = """
from pathlib import Path

def test_flaky():
    before = Path(__file__).with_suffix(".before")
    if not before.exists():
        before.touch()
        raise AssertionError("the first time")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose lanes have one test each."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "test", tmp_path / "tools")
    for name, text in (("lint", ""), ("elsewhere", 'shift; exec "$@"\n')):
        (tmp_path / "tools" / name).write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    runner = tmp_path / ".venv" / "bin" / "pytest"
    runner.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m pytest "$@"\n', encoding="utf-8")
    runner.chmod(0o755)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for folder in FOLDERS:
        place = tmp_path / "tests" / folder
        place.mkdir(parents=True, exist_ok=True)
        name = folder.replace("/", "_")
        (place / f"test_{name}.py").write_text(PASSES.format(name=name), encoding="utf-8")
    for name in ("conftest.py", "known_skips.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    return tmp_path


def run(checkout: Path, **variables: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if name != "UNIT_PYTHON"} | variables
    ended = subprocess.run(
        ["tools/test"], env=env, cwd=checkout, capture_output=True, text=True, check=False, timeout=300
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_what_passes_alone_is_named_and_does_not_fail_the_run(checkout: Path) -> None:
    (checkout / "tests" / "cluster" / "test_cluster.py").write_text(FLAKY, encoding="utf-8")
    (checkout / "tests" / "docs" / "test_docs.py").write_text(FLAKY, encoding="utf-8")
    status, output = run(checkout)
    assert status == 0, output
    assert "flaky unless it fails again:\n  tests/cluster/test_cluster.py::test_flaky" in output
    assert "flaky unless it fails again:\n  tests/docs/test_docs.py::test_flaky" in output


def test_what_fails_twice_or_skips_without_leave_fails_the_run(checkout: Path) -> None:
    broken = checkout / "tests" / "unit" / "test_unit.py"
    broken.write_text("def test_broken():\n    raise AssertionError('each time')\n", encoding="utf-8")
    skips = "import pytest\n\ndef test_skips():\n    pytest.skip('no reason')\n"
    (checkout / "tests" / "docs" / "test_docs.py").write_text(FLAKY + skips, encoding="utf-8")
    status, output = run(checkout)
    assert status == 1, output
    assert "the_rest failed (pytest's exit status: 1)" in output
    assert "pages failed (pytest's exit status: 8)" in output
    assert "pages: the tests that failed, once more" not in output


def test_another_python_runs_the_unit_tests_and_a_failure_there_fails_the_run(checkout: Path) -> None:
    for place in (
        "gpu",
        "fabric",
        "launchers",
        "runtime",
        "cloud",
        "jupyter",
        "job",
        "trackers",
        "containers",
        "run",
        "local",
        "sweep",
    ):
        (checkout / "tests" / "unit" / place).mkdir()
    for name in (
        "gpu/test_gpu",
        "jupyter/test_notebooks",
        "job/test_foreign_modules",
        "job/test_scripts",
        "containers/test_images",
        "run/test_rerun",
        "local/test_started_again",
        "sweep/test_snakemake",
    ):
        (checkout / "tests" / "unit" / f"{name}.py").write_text("def test_bound():\n    pass\n", encoding="utf-8")
    shutil.copytree(checkout / ".venv", checkout / ".venv-3.99", symlinks=True)
    (checkout / "tests" / "unit" / "test_unit.py").write_text(
        "import os\n\ndef test_runner():\n    assert '.venv-3.99' in os.environ['RUNNER']\n",
        encoding="utf-8",
    )
    other = checkout / ".venv-3.99" / "bin" / "pytest"
    other.write_text(f'#!/usr/bin/env bash\nRUNNER=$0 exec "{sys.executable}" -m pytest "$@"\n', encoding="utf-8")
    status, output = run(checkout, UNIT_PYTHON="3.99")
    assert status == 0, output
    broken = "def test_broken():\n    raise AssertionError('each time')\n"
    (checkout / "tests" / "unit" / "test_unit.py").write_text(broken, encoding="utf-8")
    status, output = run(checkout, UNIT_PYTHON="3.99")
    assert (status, "other_python failed" in output) == (1, True), output
