"""Names of functions are verbs, names of classes, modules and values are nouns: a few old words are refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("hpcjobs", "benchmarks", "tests")
REFUSED = {
    "asked", "crowded", "found", "gone", "joined", "kept", "opened", "said", "settled", "spoken", "told", "wanted",
    "whole", "word", "words",
}  # fmt: skip
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}  # in -ed, and no participles


def is_refused(name: str, is_function: bool = False) -> bool:
    """Whether the name is one of the old words, or, for a function of the package, one participle and nothing else."""
    bare = name.strip("_").lower()
    participle = is_function and bare.isalpha() and bare.endswith("ed") and bare not in VERBS
    return bare in REFUSED or participle


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether callers read the function as a value, whose name may be a state (``completed``)."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def value_name(node: ast.AST) -> str | None:
    """The name that the node gives to a value: a variable, a parameter, an attribute, an import under another name."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.ExceptHandler(name=name) | ast.alias(asname=name):
            return name
    return None


def refused_names(source: str, module: str, *, participles: bool = True) -> Iterator[str]:
    """Names in one module that are not to be used; ``participles``: of functions, those as well."""
    stem = Path(module).stem
    if is_refused(stem):
        yield stem
    for node in ast.walk(ast.parse(source)):
        value = value_name(node)
        if value is not None and is_refused(value):
            yield value
        if isinstance(node, ast.ClassDef) and is_refused(node.name):
            yield node.name
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and is_refused(node.name, participles and not is_property(node)):
            yield node.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_an_old_word(folder: str) -> None:
    refused = sorted(
        f"{path.relative_to(REPOSITORY)}:{name}"
        for path in (REPOSITORY / folder).rglob("*.py")
        for name in set(refused_names(path.read_text(encoding="utf-8"), path.name, participles=folder != "tests"))
    )
    assert not refused, f"functions are verbs; classes, modules and values are nouns (docs/glossary.md): {refused}"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("def told(): ...", ["told"]),
        ("class Box:\n    async def _sorted(self): ...", ["_sorted"]),
        ("class _Asked: ...", ["_Asked"]),
        ("def read_state(): ...\ndef need(): ...\nclass Submitted: ...\nfounder = found", []),
        ("class Job:\n    @property\n    def completed(self): ...", []),
        ("class Job:\n    @property\n    def told(self): ...", ["told"]),
        ("class Job:\n    @functools.cached_property\n    def started(self): ...", []),
        ("found = 1", ["found"]),
        ("class Split:\n    joined: list[str]", ["joined"]),
        ("def read(*, said): ...", ["said"]),
        ("unit._kept = [word for word in line]", ["_kept", "word"]),
        ("import shutil as whole", ["whole"]),
        ("try: ...\nexcept OSError as told: ...", ["told"]),
    ],
)
def test_which_names_are_refused(source: str, refused: list[str]) -> None:
    assert sorted(refused_names(source, "state.py")) == sorted(refused)


ONE_CONCEPT = {
    "RunCallback": "the same callback for two libraries, of which a program has one",
}
"""Classes of one name in several modules, and why they stay."""


def class_modules(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Class -> the modules that define it at their top level, where there are several."""
    modules: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    return {name: places for name, places in modules.items() if len(places) > 1}


def test_a_class_name_says_which_class_it_is() -> None:
    package = REPOSITORY / "hpcjobs"
    sources = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))
    }
    repeated = class_modules(sources)
    assert set(repeated) == set(ONE_CONCEPT), f"one concept, one class; two concepts, two names: {repeated}"


def test_which_class_names_are_repeated() -> None:
    sources = {"a.py": "class Job: ...\ndef make():\n    class Part: ...", "b.py": "class Part: ..."}
    assert class_modules(sources) == {}
    assert class_modules({**sources, "c.py": "class Job: ..."}) == {"Job": ["a.py", "c.py"]}


def test_a_module_is_not_named_by_an_old_word() -> None:
    assert list(refused_names("", "package/told.py")) == ["told"]


def test_no_two_modules_of_unit_tests_have_one_name() -> None:
    """pytest refuses the second one when both run together, as in CI, and not when each runs alone."""
    modules: dict[str, list[str]] = {}
    folders = ("unit", "simulation", "figures", "packaging")
    for path in (path for folder in folders for path in sorted((REPOSITORY / "tests" / folder).rglob("test_*.py"))):
        # The trainers are a run of their own, and a package's modules have its name.
        if not (path.parent / "__init__.py").exists() and "trainers" not in path.parts:
            modules.setdefault(path.name, []).append(str(path.relative_to(REPOSITORY)))
    assert [places for places in modules.values() if len(places) > 1] == []
