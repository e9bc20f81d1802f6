"""A sweep from another host or cluster with the same home."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from commandline import ok, within
from msgspec.structs import replace
from waiting import eventually

from hpcjobs.run.index import entries
from hpcjobs.run.job_files import keep_ends, own_ids
from hpcjobs.run.status import end_cancelled, statuses


def test_cells_that_wait_on_another_host_are_neither_submitted_again_nor_cancelled(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "1")
    run = ("sweep", "run", "--site", "local", "--name", "s", "-t", "5m", "--set", "i=1,2,3", "sleep", "60")
    ok(*run)
    with monkeypatch.context() as other:
        other.setattr(os, "uname", lambda: SimpleNamespace(nodename="login2"))
        status = ok("sweep", "status", "s").out
        answers = [within("sweep", "resume", "s"), within(*run), within("sweep", "cancel", "s")]
    assert ("UNKNOWN" in status, "MISSING" in status, "resume" in status) == (True, False, False), status
    assert [(answer.code, "and this is host login2" in answer.err) for answer in answers] == [(5, True)] * 3, answers
    assert len(list(here.rglob("chunks/*"))) == 1
    ok("sweep", "cancel", "s")


def test_another_host_is_not_advised_to_resume_what_runs_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "1")
    cell = "test {i} = 2 && sleep 60; exit 1"
    ok("sweep", "run", "--site", "local", "--name", "s", "-t", "5m", "--set", "i=1,2", "sh", "-c", cell)
    eventually(lambda: "FAILED" in ok("sweep", "status", "s").out)
    assert "1 to run again: hpcjobs sweep resume s" in ok("sweep", "status", "s").out
    with monkeypatch.context() as other:
        other.setattr(os, "uname", lambda: SimpleNamespace(nodename="login2"))
        status, resumed = ok("sweep", "status", "s").out, within("sweep", "resume", "s")
    assert ("sweep resume" in status, "1 to run again: refused here: job L1" in status) == (False, True), status
    assert (resumed.code, "belongs to host" in resumed.err) == (5, True), resumed
    ok("sweep", "cancel", "s")


def test_a_sweep_whose_cells_have_a_recorded_end_goes_on_from_another_host(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were cancelled while they waited, and so wrote no end themselves."""
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "1")
    ok("submit", "--site", "local", "--name", "before", "-t", "5m", "sleep", "60")
    eventually(lambda: [row["record"]["state"] for row in ok("ps", "--json").json] == ["RUNNING"])
    ok("sweep", "run", "--site", "local", "--name", "s", "-t", "5m", "--set", "i=1,2,3", "sleep", "60")
    (entry,) = (entry for entry in entries() if entry.name == "s")
    ok("sweep", "cancel", "s")
    ok("cancel", "before")
    (known,) = statuses([entry])
    first, *others = (replace(known.records[0], job_id=task) for task in own_ids(entry))
    keep_ends(entry, [end_cancelled(record, 1.0) for record in others])
    folder = Path(entry.run_dir) / "0"
    folder.mkdir(exist_ok=True)
    state = {"job_id": first.job_id, "state": "FAILED", "exit_code": 1, "started": 0.5, "ended": 1.0, "nodes": "vm"}
    (folder / "state.json").write_text(json.dumps(state))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="login2"))
    assert ok("sweep", "cancel", "s").code == 0
    ok("sweep", "resume", "s")
    assert len(list(here.rglob("chunks/*"))) == 2
    ok("sweep", "cancel", "s")
