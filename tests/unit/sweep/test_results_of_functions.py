"""What a sweep over a Python function keeps of the values that the function returns."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import hpcjobs

MODULE = """\
def tree(depth):
    node = {"depth": depth}
    node["root"] = node
    return node
"""


def test_a_result_that_holds_itself_is_kept_although_json_cannot_hold_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "trees.py").write_text(MODULE)
    monkeypatch.syspath_prepend(here)
    from trees import tree  # type: ignore[import-not-found]

    sweep = hpcjobs.sweep(tree, hpcjobs.grid(depth=[1, 2]), site="local")
    sweep.submit()
    assert sweep.wait(timeout_s=60) == {"COMPLETED": 2}
    results = [pickle.loads(file.read_bytes()) for file in sorted(sweep.path.rglob("result.pkl"))]
    assert [result["root"] is result for result in results] == [True, True]
