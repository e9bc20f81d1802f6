"""The graph of imports in docs/architecture.md is the one that the syntax trees give.

GOLDEN=write .venv/bin/pytest tests/unit/test_import_graph.py draws it anew.
"""

from __future__ import annotations

import functools
import os
from graphlib import TopologicalSorter
from pathlib import Path

from test_architecture import PACKAGE, imported, modules, room

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "```mermaid\nflowchart BT\n", "```\n"
GROUND = "ground"


def package_of(path: Path) -> str:
    """The package that a module is in; the modules beside the packages are drawn as one."""
    name = room(path)
    return name if _is_package(name) else GROUND


@functools.cache
def read_imports() -> dict[str, set[str]]:
    """Each package, and those that it imports from; without the public names and the entry point of the command."""
    graph: dict[str, set[str]] = {}
    for path in modules():
        if room(path) in ("hpcjobs", "__main__"):
            continue
        names = {name.split(".")[1] for name in imported(path) if name.startswith("hpcjobs.")}
        others = {name if _is_package(name) else GROUND for name in names if _is_module(name)}
        package = package_of(path)
        graph.setdefault(package, set()).update(others - {package})
    return graph


def _is_package(name: str) -> bool:
    """Whether it has a file of its own: a package that became a module leaves a folder of compiled files behind."""
    return (PACKAGE / name / "__init__.py").is_file()


def _is_module(name: str) -> bool:
    return _is_package(name) or (PACKAGE / f"{name}.py").is_file()


def reach(graph: dict[str, set[str]], package: str) -> set[str]:
    """Every package that ``package`` imports from, directly or through others."""
    return graph[package].union(*(reach(graph, other) for other in graph[package]))


def draw(graph: dict[str, set[str]]) -> str:
    """The graph in Mermaid's notation, without the arrows that follow from two others."""
    lines = []
    for package in TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order():
        indirect = set[str]().union(*(reach(graph, other) for other in graph[package]))
        lines += [f"    {package} --> {other}" for other in sorted(graph[package] - indirect)]
    return "\n".join(lines) + "\n"


def test_packages_import_each_other_in_no_circle() -> None:
    list(TopologicalSorter(read_imports()).static_order())


def test_the_graph_in_the_documentation_is_the_one_of_the_code() -> None:
    page, drawn = PAGE.read_text(encoding="utf-8"), draw(read_imports())
    before, _, rest = page.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(before + BEGIN + drawn + END + after, encoding="utf-8")
    else:
        assert shown == drawn, "GOLDEN=write .venv/bin/pytest tests/unit/test_import_graph.py draws it anew"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    assert draw({"cli": {"run", "site"}, "run": {"site"}, "site": set()}) == "    run --> site\n    cli --> run\n"
