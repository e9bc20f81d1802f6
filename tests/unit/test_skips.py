"""A skip fails the run unless tests/known_skips.txt allows it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AS_ROOT = """
import os, sys, pytest
sys.prefix, os.geteuid = sys.argv[1], lambda: 0
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"]))
"""
PROJECT = """
[tool.pytest.ini_options]
testpaths = ["tests"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two tests, of which that of Horovod skips where it is not installed."""
    folder = tmp_path / "tests" / "unit" / "horovod"
    folder.mkdir(parents=True)
    (folder / "test_world.py").write_text("import pytest\npytest.importorskip('horovod_that_did_not_build')\n")
    (folder.parent / "test_other.py").write_text("def test_other():\n    pass\n")
    for name in ("conftest.py", "known_skips.txt"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


def run_as_root(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_ROOT, str(project)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_skips_of_horovod_fail_a_run_as_root_where_nobody_stated_why_it_is_not_there(project: Path) -> None:
    ended = run_as_root(project)
    assert ended.returncode == 8, ended
    assert "NOT ON THE LIST: tests/unit/horovod/test_world.py" in ended.stdout


def test_skips_of_horovod_are_allowed_where_its_build_failed_and_the_run_shows_why(project: Path) -> None:
    (project / ".no-horovod").write_text("it did not build; see above\n")
    ended = run_as_root(project)
    assert ended.returncode == 0, ended
    assert "known: tests/unit/horovod/test_world.py" in ended.stdout
    assert "no Horovod: it did not build; see above\n" in ended.stdout


def test_each_test_that_only_root_can_run_is_on_the_list() -> None:
    """Tests run as root do not show that one is missing: an ordinary user's run would fail."""
    lines = (line.split() for line in (TESTS / "known_skips.txt").read_text(encoding="utf-8").splitlines())
    patterns = [arguments[1] for arguments in lines if arguments and arguments[0] == "not-root"]
    tests = [
        f"{path.relative_to(TESTS.parent)}::{node.name}"
        for path in (TESTS / "unit").rglob("test_*.py")
        if "uid() != 0" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        if any("skipif(os.getuid() != 0" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(tests) > 4
    assert [test for test in tests if not any(fnmatchcase(test, pattern) for pattern in patterns)] == []
