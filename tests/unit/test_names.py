"""Names of functions are verbs, names of classes and modules are nouns: a few old words are refused in new code.

tests/data/old_names.txt lists the names that stand today. The list can only shrink.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OLD_NAMES = Path(__file__).parents[1] / "data" / "old_names.txt"
REFUSED = {
    "asked", "crowded", "found", "gone", "joined", "kept", "opened", "said", "settled", "spoken", "told", "wanted",
    "whole", "word",
}  # fmt: skip
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}  # in -ed, and no participles


def is_refused(name: str, is_function: bool = False) -> bool:
    """Whether the name is one of the old words, or, for a function, one participle and nothing else."""
    bare = name.strip("_").lower()
    participle = is_function and bare.isalpha() and bare.endswith("ed") and bare not in VERBS
    return bare in REFUSED or participle


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether callers read the function as a value, whose name may be a state (``completed``)."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def refused_names(source: str, module: str) -> Iterator[str]:
    """Names in one module that new code must not use."""
    stem = Path(module).stem
    if is_refused(stem):
        yield stem
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and is_refused(node.name):
            yield node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_refused(node.name, not is_property(node)):
            yield node.name


@functools.cache
def all_refused_names() -> set[str]:
    """``path:name`` for the package and the benchmarks."""
    return {
        f"{path.relative_to(REPOSITORY)}:{name}"
        for folder in ("hpcjobs", "benchmarks")
        for path in (REPOSITORY / folder).rglob("*.py")
        for name in refused_names(path.read_text(encoding="utf-8"), path.name)
    }


def listed_names() -> set[str]:
    return {line for line in OLD_NAMES.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def test_no_new_name_is_an_old_word() -> None:
    new = sorted(all_refused_names() - listed_names())
    assert not new, f"functions are verbs, classes and modules nouns (docs/glossary.md); do not list these: {new}"


def test_the_list_of_old_names_shrinks_with_the_code() -> None:
    removed = sorted(listed_names() - all_refused_names())
    assert not removed, f"these names are no longer there: remove their lines from {OLD_NAMES.name}: {removed}"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("def told(): ...", ["told"]),
        ("class Box:\n    async def _sorted(self): ...", ["_sorted"]),
        ("class _Asked: ...", ["_Asked"]),
        ("def read_state(): ...\ndef need(): ...\nclass Submitted: ...\nfound = 1", []),
        ("class Job:\n    @property\n    def completed(self): ...", []),
        ("class Job:\n    @property\n    def told(self): ...", ["told"]),
        ("class Job:\n    @functools.cached_property\n    def started(self): ...", []),
    ],
)
def test_which_names_are_refused(source: str, refused: list[str]) -> None:
    assert list(refused_names(source, "state.py")) == refused


def test_a_module_is_not_named_by_an_old_word() -> None:
    assert list(refused_names("", "package/told.py")) == ["told"]
