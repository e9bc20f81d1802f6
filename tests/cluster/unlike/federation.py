"""A cluster of a federation whose jobs start on its sibling: there they are the user's as they are here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from commandline import ok, within
from nodeless import controller, manage, write_files
from shared import shared_folder
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox, Shape

ORIGIN = """\
NodeName=o1 CPUs=4 RealMemory=4000
PartitionName=cpu Nodes=o1 Default=YES MaxTime=1-0
"""
SITE = "slurm_conf: {conf}\npartitions: {{cpu: {{nodes: 1, node: {{cpus: 4}}}}}}\ndefaults: {{account: shared}}\n"
SUBMIT = ("submit", "--site", "./site.yaml", "-n", "1", "-t", "5m", "--parsable")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        yield sandboxes.up(Shape(nodes=1, cpus_per_node=4))
    finally:
        sandboxes.down()


@pytest.fixture
def sibling(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """The current folder has the site file of a cluster without nodes that work; gives the state on the other one."""
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}

    def state_there(job_id: str) -> str:
        argv = ["squeue", "--local", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
        return subprocess.run(argv, env=env, capture_output=True, text=True).stdout.strip()

    with shared_folder() as folder:
        for name in ("origin", "home", "work"):
            (folder / name).mkdir()
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.chdir(folder / "work")
        both = "cluster=origin,sandbox"
        manage(sandbox, "add", "cluster", "origin")
        manage(sandbox, "add", "account", "shared", both)
        manage(sandbox, "add", "user", "root", "account=shared", both)
        conf = write_files(sandbox, "origin", ORIGIN, folder / "origin")
        (folder / "work" / "site.yaml").write_text(SITE.format(conf=conf))
        with controller(conf) as origin:
            monkeypatch.setenv("SLURM_CONF", str(conf))
            manage(sandbox, "add", "federation", "both", "clusters=origin,sandbox")
            try:
                eventually(lambda: "Sibling" in origin.run("scontrol", "show", "federation").stdout)
                origin.run("scontrol", "update", "NodeName=o1", "State=DOWN", "Reason=test")
                yield state_there
            finally:
                manage(sandbox, "delete", "federation", "both")
                manage(sandbox, "delete", "cluster", "origin")


def listed(job_id: str) -> list[str]:
    return [row["record"]["state"] for row in ok("ps", "-a", "--json").json if row["record"]["job_id"] == job_id]


def test_a_job_that_starts_on_the_sibling_is_listed_waited_for_changed_and_cancelled(
    sibling: Callable[[str], str],
) -> None:
    job_id = (
        ok(*SUBMIT, "sh", "-c", "echo begun; until [ -e go ]; do sleep 0.2; done; exit 3").out.split(";")[0].strip()
    )
    eventually(lambda: sibling(job_id) == "RUNNING")
    eventually(lambda: listed(job_id) == ["RUNNING"])
    assert f"{job_id}: RUNNING" in ok("show", job_id).out
    with open("go", "w"):
        waited = within("wait", job_id)
    assert (waited.code, "REVOKED" in waited.err) == (3, False), waited
    eventually(lambda: listed(job_id) == ["FAILED"])
    job_id = ok(*SUBMIT, "sleep", "600").out.split(";")[0].strip()
    eventually(lambda: sibling(job_id) == "RUNNING")
    ok("update", job_id, "time=4m")
    assert "cancelled" in ok("cancel", job_id).out
    eventually(lambda: sibling(job_id) == "CANCELLED")
    assert "CANCELLED" in within("wait", job_id).err


def test_a_job_with_retries_that_starts_on_the_sibling_requests_its_next_start(sibling: Callable[[str], str]) -> None:
    job_id = ok(*SUBMIT, "--retries", "error=1", "sh", "-c", "exit 3").out.split(";")[0].strip()
    eventually(lambda: "requeued" in ok("show", job_id).out)
    eventually(lambda: sibling(job_id) == "PENDING")
    # Its first cluster hears of it later; beside it may stand a job of an earlier controller, which had this id.
    eventually(lambda: "PENDING" in listed(job_id))
    assert "cancelled" in ok("cancel", job_id).out
    eventually(lambda: "CANCELLED" in listed(job_id))


def test_a_job_of_sbatch_that_starts_on_the_sibling_is_served_too(sibling: Callable[[str], str]) -> None:
    argv = ["sbatch", "--parsable", "--account=shared", "--wrap=sleep 600"]
    job_id = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split(";")[0].strip()
    eventually(lambda: sibling(job_id) == "RUNNING")
    eventually(lambda: "RUNNING" in listed(job_id), what="beside a job of an earlier controller, perhaps, its listing")
    assert "RUNNING" in ok("show", job_id).out
    assert "it has not failed" in ok("why", job_id).out
    assert "cancelled" in ok("cancel", job_id).out
    eventually(lambda: sibling(job_id) == "CANCELLED")
