"""A cell whose files are damaged takes no other cell with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok, within


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    return here


@pytest.mark.parametrize("text", ["", "{", '{"job_id": "L1_0"}', "[]", '"x"'])
def test_a_damaged_state_of_a_cell_is_named_and_the_others_are_shown(text: str) -> None:
    arguments = ("--site", "local", "--set", "lr=1,2", "--name", "lr")
    ok("sweep", "run", *arguments, "--wait", "true")
    (first, _) = ok("sweep", "results", "lr", "--json").json
    state = Path(first["folder"], "state.json")
    assert state.exists()
    for cache in state.parents[2].glob("completed.json"):
        cache.unlink()
    state.write_text(text)
    answer = within("sweep", "results", "lr", "--json")
    assert answer.code == 0, answer
    assert f"{state} cannot be used" in answer.err
    assert [row["state"] for row in answer.json][1] == "COMPLETED"


@pytest.mark.parametrize("text", ["", "{", "loss 0.5", "[]", "\udcff"], ids=["empty", "cut", "text", "list", "bytes"])
def test_a_damaged_summary_of_a_cell_is_named_and_the_others_are_shown(text: str) -> None:
    program = 'echo "{\\"loss\\": {lr}}" >"$HPCJOBS_RUN_DIR/summary.json"'
    ok("sweep", "run", "--site", "local", "--set", "lr=1,2", "--name", "lr", "--wait", "sh", "-c", program)
    (first, second) = ok("sweep", "results", "lr", "--json").json
    assert [row["measured"] for row in (first, second)] == [{"loss": 1}, {"loss": 2}]
    summary = Path(first["folder"], "summary.json")
    summary.write_text(text, errors="surrogateescape")
    answer = ok("sweep", "results", "lr", "--json")
    assert f"{summary} cannot be used" in answer.err
    assert [row["measured"] for row in answer.json] == [{}, {"loss": 2}]


@pytest.mark.parametrize("name", ["sweep.json", "chunks/0001/chunk.json", "chunks/0001/submitted.json"])
@pytest.mark.parametrize("text", ["", '{"name": 7}', "[]", "\udcff"], ids=["empty", "of other types", "list", "bytes"])
def test_a_damaged_file_of_a_sweep_is_named_by_every_verb(name: str, text: str) -> None:
    ok("sweep", "run", "--site", "local", "--set", "lr=1,2", "--name", "lr", "--wait", "true")
    (folder,) = Path("runs").glob("sweep-lr*")
    (folder / name).write_text(text, errors="surrogateescape")
    verbs = (("status", "lr"), ("results", "lr"), ("resume", "lr"), ("cancel", "lr"))
    for verb in verbs:
        answer = within("sweep", *verb)
        assert answer.code not in (0, 1, 70), (verb, answer)
        assert f"{name} cannot be used" in answer.err, (verb, answer)
