"""A sweep from another host or cluster with the same home."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from commandline import ok, within


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
