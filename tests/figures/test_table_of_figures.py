"""The table of figures in docs/metrics.md names each test of this folder, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "metrics.md"


def test_the_table_of_figures_and_the_tests_agree() -> None:
    modules = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules]
    functions = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    section = PAGE.read_text(encoding="utf-8").partition("\n## Figures and their tests\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert all(len(row.split("|")) == len(rows[0].split("|")) for row in rows)
    listed = [re.findall(r"`(test_\w+)`", row.split("|")[-2]) for row in rows]
    assert all(listed), "each row has a test"
    assert {name for names in listed for name in names} == {name for name in functions if name.startswith("test_")}
