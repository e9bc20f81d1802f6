"""SKILL.md: what it says of each verb is so."""

from __future__ import annotations

import json

import pytest
from commandline import ok, within

from hpcjobs.cli import VERBS
from hpcjobs.cli.about import CHANGES, REFUSED_READ_ONLY
from hpcjobs.cli.json_output import OUTPUTS


def test_it_names_every_verb_and_every_exit_code() -> None:
    text = ok("skill").out
    assert text.startswith("---\nname: hpcjobs\n")
    assert all(f"| `{verb}` | {CHANGES.get(verb, '-')} |" in text for verb in VERBS)
    assert set(VERBS) > set(CHANGES)
    for code in (0, 2, 3, 4, 5, 6, 7, 8, 9, 70, 130):
        assert f"\n| {code} | " in text
    assert max(map(len, text.splitlines())) < 200


def test_a_json_schema_is_printed_by_verb() -> None:
    for verb in OUTPUTS:
        assert json.loads(ok("skill", "--schema", verb).out), verb
    assert within("skill", "--schema", "pss").code == 2


@pytest.mark.parametrize("verb", ["submit", "cancel", "requeue", "hold"])
def test_verbs_that_change_jobs_are_refused_where_only_reading_is_allowed(
    verb: str, here: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verb in REFUSED_READ_ONLY
    job = ok("submit", "--site", "local", "sleep", "60").out.split()[1]
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    assert within(verb, *(["--site", "local", "true"] if verb == "submit" else [job])).code == 5
    monkeypatch.delenv("HPCJOBS_READ_ONLY")
    ok("cancel", job)


def test_it_tells_which_verbs_a_read_only_environment_refuses(here: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.split("`")[1]: row.split(" | ")[2] for row in ok("skill").out.splitlines() if row.startswith("| `")}
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    ok("init", "--site", "local", "true")
    assert (rows["init"], rows["monitor"], rows["top"], rows["doctor"]) == ("-", "yes", "yes", "yes")
