"""Each benchmark answers --help and does not begin to measure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_a_benchmark_parses_its_command_line_first(path: Path) -> None:
    main = next(
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    first = next(line for line in main.body if not isinstance(getattr(line, "value", None), ast.Constant))
    assert any(name in ast.unparse(first) for name in ("parse_no_arguments(", "parser_of(", "ArgumentParser("))


@pytest.mark.parametrize("name", ["script_log", "containers", "cli_start"])
def test_help_of_a_benchmark_is_its_docstring(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True)
    first = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    assert first is not None
    assert done.returncode == 0, done.stderr
    assert first.split()[:8] == done.stdout.split("\n\n")[1].split()[:8]
