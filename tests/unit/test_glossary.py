"""docs/glossary.md names each concept once, and only what is in the code."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| term "))
]


def test_each_concept_has_one_name_and_a_sentence() -> None:
    terms = [term for term, _, _ in ROWS]
    assert len(terms) > 40
    assert len({term.lower() for term in terms}) == len(terms)
    assert [meaning for _, meaning, _ in ROWS if not meaning.endswith(".")] == []


def test_the_glossary_names_what_the_code_has() -> None:
    """Options, variables, files and types in the first two columns."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "hpcjobs").rglob("*.py"))
    quoted = {name for term, meaning, _ in ROWS for name in re.findall(r"`([^`]+)`", term + meaning)}
    bare = {name.removeprefix("hpcjobs ").removeprefix("--") for name in quoted}
    assert {name for name in bare if name not in code and name.replace("-", "_") not in code} == set()
