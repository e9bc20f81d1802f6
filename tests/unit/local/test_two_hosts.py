"""Two hosts with one home, each with a local queue of its own that gives out the same ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOSTS = ("alpha", "beta")
SUBMIT = """
import sys
import hpcjobs
host, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    program = ["true"] if number % 10 == 0 else ["sleep", "600"]
    hpcjobs.submit(hpcjobs.plan(program, site="local", launcher="spawn", cpus_per_task=1, name=f"{host}-{number + 1}"))
"""


def command(host: str, *argv: str) -> list[str]:
    """``argv`` on a host of that name: a UTS namespace of its own."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *argv]


def hpcjobs(host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = command(host, sys.executable, "-m", "hpcjobs", *arguments)
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=500)


def rows(host: str) -> list[dict[str, Any]]:
    answer = hpcjobs(host, "ps", "-a", "--site", "local", "--json")
    assert answer.returncode == 0, answer
    document: list[dict[str, Any]] = json.loads(answer.stdout)
    return document


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.long)])
def test_no_job_of_one_host_is_shown_waited_for_or_cancelled_as_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    if subprocess.run(command("alpha", "true"), capture_output=True, check=False).returncode != 0:
        pytest.skip("UTS namespaces need root")
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "3")
    submitters = [subprocess.Popen(command(host, sys.executable, "-c", SUBMIT, host, str(count))) for host in HOSTS]
    try:
        assert [process.wait(500) for process in submitters] == [0, 0]
        for host in HOSTS:
            listed = rows(host)
            assert len({row["run_dir"] for row in listed}) == 2 * count
            for row in listed:
                owner = row["name"].split("-")[0]
                record = row["record"]
                if owner == host:
                    assert record["source"] == "local", row
                elif record["state"] != "COMPLETED":  # else what the other host has left in the run folder counts
                    assert (record["source"] in ("job", "nobody"), record["reason"]) == (True, f"on host {owner}"), row
            first = hpcjobs(host, "wait", "L1")
            assert first.returncode == 0, first
            assert json.loads(hpcjobs(host, "show", "--json", "L1").stdout)["entry"]["name"] == f"{host}-1"
        cancelled = hpcjobs("alpha", "cancel", f"L1-L{count}")
        assert cancelled.returncode == 0, cancelled
        assert hpcjobs("alpha", "wait", f"L1-L{count}").returncode != 0
        others = [row["record"]["state"] for row in rows("beta") if row["name"].startswith("beta-")]
        assert "CANCELLED" not in others
        assert {"RUNNING", "COMPLETED"} <= set(others)
        theirs = next(row["run_dir"] for row in rows("alpha") if row["name"] == "beta-2")
        refused = hpcjobs("alpha", "cancel", theirs)
        assert refused.returncode == 5
        assert "belongs to host beta, and this is host alpha" in refused.stderr
        ended = [row["record"]["state"] for row in rows("alpha") if row["name"].startswith("alpha-")]
        assert set(ended) == {"CANCELLED", "COMPLETED"}
    finally:
        for host in HOSTS:
            hpcjobs(host, "cancel", f"L1-L{count}")
    assert os.listdir(Path.home() / ".local" / "state" / "hpcjobs" / "jobs") != []
