"""The table of figures in docs/metrics.md names each printed figure and each test of it, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "metrics.md"
RECORDED = HERE.parent / "data" / "golden_output"
ELSEWHERE = {"test_a_node_with_a_slow_network_is_named_and_a_spare_one_takes_its_place": HERE.parent / "cluster"}
"""Tests that need more than one machine."""
TEXTS = {
    *("JOB", "NAME", "USER", "SITE", "STATE", "REASON", "EXIT", "RUN FOLDER", "ADVICE", "ALL", "NODE", "LAW", "REMARK"),
    *("PARAMETER", "PARTITION", "VALID", "LR"),
}
"""Columns that are no figures."""
COMMANDS = {
    "ps": ("ps", "ps_tasks"), "report jobs": ("report_jobs",), "report jobs --by": ("report_jobs_by",),
    "report load": ("report_load",), "report scaling": ("report_scaling",), "report sweep": ("report_sweep",),
    "sweep results": ("sweep_results",), "where": ("where",),
}  # fmt: skip
"""Command -> recorded output with tables."""
UNITS_AS_HEADERS = {"RUNS/H": "throughput"}


class Row(NamedTuple):
    """One row of the table."""

    commands: list[str]
    figures: list[str]
    cells: list[str]
    tests: list[str]


def rows() -> Iterator[Row]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Figures and their tests\n")[2].partition("\n## ")[0]
    for line in [line for line in section.splitlines() if line.startswith("| ")][1:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        commands, _, figures = cells[0].partition(": ")
        yield Row(
            re.findall(r"`([^`]+)`", commands), figures.split(", "), cells, re.findall(r"`(test_\w+)`", cells[-1])
        )


def functions() -> dict[str, Path]:
    """Test -> module."""
    return {
        node.name: path
        for folder in (HERE, *ELSEWHERE.values())
        for path in folder.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if folder == HERE or node.name in ELSEWHERE
    }


def test_each_row_is_complete_and_each_test_has_a_row() -> None:
    assert all(len(row.cells) == 5 and all(row.cells) for row in rows())
    assert {name for row in rows() for name in row.tests} == functions().keys()
    assert all(row.tests for row in rows())


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.cells[0][:40])
def test_the_tests_of_a_row_look_at_each_of_its_figures(row: Row) -> None:
    modules = {functions()[name] for name in row.tests}
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    assert [figure for figure in row.figures if figure.strip("`") not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_recorded_column_of_figures_has_a_row(command: str) -> None:
    listed = {figure for row in rows() if command in row.commands for figure in row.figures}
    for name in COMMANDS[command]:
        output = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("--- terminal")[0].splitlines()
        headers = [header for line, rule in pairwise(output) if rule.startswith("───")
                   for header in re.split(r"\s{2,}", line.strip())]  # fmt: skip
        assert headers
        assert {UNITS_AS_HEADERS.get(header, header) for header in headers} - TEXTS - listed == set()


def test_each_column_of_a_scaling_report_has_a_row() -> None:
    """The recorded study has no summaries: the test of a complete one has the other columns."""
    listed = {figure for row in rows() if "report scaling" in row.commands for figure in row.figures}
    source = (HERE.parents[1] / "hpcjobs" / "scaling" / "page.py").read_text(encoding="utf-8")
    (cells,) = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == "_cells"]
    (table,) = [node for node in ast.walk(cells) if isinstance(node, ast.Dict)]
    headers = {key.value.upper() for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    assert headers - listed == set()


def test_each_number_of_a_summary_has_a_row_or_is_a_setting() -> None:
    settings = {"schema", "exit_code", "world_size", "nnodes", "threads_per_rank", "resumed_from_step", "lr", "config"}
    listed = {figure.strip("`") for row in rows() if "summary.json" in row.commands for figure in row.figures}
    source = (HERE.parents[1] / "hpcjobs" / "record" / "summary.py").read_text(encoding="utf-8")
    (summary,) = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == "RunSummary"]
    fields = {ast.unparse(node.target): ast.unparse(node.annotation) for node in ast.walk(summary)
              if isinstance(node, ast.AnnAssign)}  # fmt: skip
    numbers = {name for name, kind in fields.items() if not re.fullmatch(r"(str|tuple\[str.*\])( \| None)?", kind)}
    assert numbers - settings - listed == set()
