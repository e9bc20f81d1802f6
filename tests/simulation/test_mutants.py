"""The defects of the past that `make mutants` puts back still are changes of today's code."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))

import find

PATCHES = sorted(find.HERE.glob("*.patch"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, which each test changes and sets back."""
    target = tmp_path_factory.mktemp("code") / "hpcjobs"
    shutil.copytree(find.ROOT / "hpcjobs", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_defect_can_be_put_back_into_one_place_of_the_code(patch: Path, package: Path) -> None:
    hunks = find.read_hunks(patch)
    assert hunks
    changed = {find.apply(hunk, package) for hunk in hunks}
    for path in changed:
        original = find.ROOT / "hpcjobs" / path.relative_to(package)
        assert path.read_text() != original.read_text()
        shutil.copyfile(original, path)


def test_a_patch_whose_lines_are_gone_is_refused(package: Path, tmp_path: Path) -> None:
    stale = tmp_path / "stale.patch"
    stale.write_text("A defect.\n\n@@ submit\n-    a line that nobody wrote\n+    pass\n")
    with pytest.raises(find.StaleError, match="submit: 0 places"):
        find.apply(find.read_hunks(stale)[0], package)


def test_there_are_as_many_defects_as_the_documentation_says() -> None:
    text = (find.ROOT / "docs/track_record.md").read_text()
    assert f"puts {len(PATCHES)} defects of the past back" in text
