"""An agent with a budget on a real Slurm, by JSON and exit codes: nothing is over the budget, as sacct counts it.

The tasks on this machine are in tests/unit/cli/test_agent_tasks.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from login_node import SITE, Cluster
from waiting import eventually

from hpcjobs.site.machine import sandbox_root

JOBS, NODE_HOURS = 3, 0.5


@pytest.fixture
def agent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A login node of an agent; at its end every start of its jobs is counted."""
    monkeypatch.setenv("HPCJOBS_SITE", SITE)
    monkeypatch.setenv("HPCJOBS_BUDGET", f"jobs={JOBS},node_hours={NODE_HOURS}")
    yield cluster
    monkeypatch.delenv("HPCJOBS_READ_ONLY", raising=False)
    names = sorted({row["record"]["job_id"].partition("_")[0] for row in own_rows(cluster)})
    cluster.submitted.extend(names)

    def accounted() -> list[list[str]]:
        """Every start with its limit and nodes; empty while slurmdbd has only a part of a start."""
        out = cluster.slurm("sacct", "-DnXP", "-o", "TimelimitRaw,ReqNodes", "-j", ",".join(names))
        rows = [row.split("|") for row in out.split()]
        return rows if all(minutes for minutes, _ in rows) else []

    eventually(accounted, what="the accounting of all starts")
    rows = accounted()
    starts = [(int(minutes), int(nodes)) for minutes, nodes in rows]
    assert 0 < len(starts) <= JOBS, rows
    assert sum(minutes * nodes for minutes, nodes in starts) / 60 <= NODE_HOURS, rows


def own_rows(cluster: Cluster) -> list[Any]:
    """The rows of ``ps`` with a run folder: jobs of other tests have none here."""
    return [row for row in run(cluster, "ps", "-a") if row["run_dir"] is not None]


def run(cluster: Cluster, *arguments: str, code: int = 0) -> Any:
    answer = cluster.hpcjobs(arguments[0], "--json", *arguments[1:])
    assert answer.code == code, answer
    return answer.json


def refuse(cluster: Cluster, *arguments: str, because: str = "left of HPCJOBS_BUDGET") -> None:
    assert because in run(cluster, *arguments, code=5)["error"]["message"]


def test_a_job_of_two_nodes_is_run_and_a_larger_one_refused(agent: Cluster) -> None:
    job = run(agent, "submit", "-N", "2", "-t", "5", "hostname")["job_id"]
    (record,) = run(agent, "wait", job)
    assert (record["state"], record["nnodes"]) == ("COMPLETED", 2)
    refuse(agent, "submit", "-N", "4", "-t", "10", "hostname")
    refuse(agent, "submit", "-N", "2", "-t", "5", "-a", "0-2", "hostname")
    refuse(agent, "submit", "-t", "1", "--retries", "on", "hostname")


def test_a_held_job_is_explained_released_and_not_prolonged_beyond_the_budget(agent: Cluster) -> None:
    job = run(agent, "submit", "--hold", "-t", "10", "hostname")["job_id"]
    assert run(agent, "why", job)["reason"] == "JobHeldUser"
    refuse(agent, "update", job, "time=2h")
    refuse(agent, "update", job, "nodes=4")
    refuse(agent, "update", job, "NumCPUs=64")
    run(agent, "update", job, "time=20m")
    assert run(agent, "show", job)["records"][0]["time_limit_s"] in (1200, None)
    assert "TimeLimit=00:20:00" in agent.slurm("scontrol", "show", "job", job)
    refuse(agent, "update", job, "time=40m")
    run(agent, "update", job, "time=5m")
    run(agent, "release", job)
    assert run(agent, "wait", job)[0]["state"] == "COMPLETED"


def test_each_requeue_counts(agent: Cluster) -> None:
    job = run(agent, "submit", "-t", "5", "sleep", "600")["job_id"]
    for _ in range(JOBS - 1):
        eventually(lambda: agent.slurm("squeue", "-h", "-o", "%T", "-j", job).split() == ["RUNNING"])
        run(agent, "requeue", job)
    refuse(agent, "requeue", job)
    refuse(agent, "submit", "-t", "5", "hostname")
    assert run(agent, "cancel", job)["cancelled"] == [job]


def test_a_job_without_the_environment_of_its_submitter_has_its_budget(agent: Cluster) -> None:
    """Its script lets sbatch pass no variable on; of four jobs that it submits two are accepted."""
    command = f"{sys.executable} -m hpcjobs submit --site {SITE} -t 1 hostname"
    script = Path(agent.folder / "nested.sh")
    script.write_text(
        "#!/bin/bash\n#SBATCH --export=NONE\n#SBATCH --time=5\n"
        f"export HOME={agent.folder}/home HPCJOBS_SANDBOX_ROOT={sandbox_root()}\ncd {agent.folder}\n"
        f"for n in 1 2 3 4; do {command}; done\nexit 0\n"
    )
    job = run(agent, "submit", "nested.sh")["job_id"]
    run(agent, "wait", job)
    accepted = [row["record"]["job_id"] for row in own_rows(agent) if row["name"] == "hostname"]
    assert len(accepted) == JOBS - 1, run(agent, "logs", job)
    run(agent, "wait", *accepted)


def test_nothing_is_changed_by_a_read_only_agent(agent: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = run(agent, "submit", "-t", "5", "sleep", "600")["job_id"]
    eventually(lambda: agent.slurm("squeue", "-h", "-o", "%T", "-j", job).split() == ["RUNNING"])
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    for arguments in (
        ("cancel", job),
        ("cancel", "--signal", "USR1", job),
        ("hold", job),
        ("requeue", job),
        ("update", job, "time=1"),
        ("submit", "-t", "1", "hostname"),
        ("rerun", job),
    ):
        refuse(agent, *arguments, because="HPCJOBS_READ_ONLY=1 is set")
    assert agent.hpcjobs("exec", job, "hostname").code == 5
    assert agent.slurm("squeue", "-h", "-o", "%T", "-j", job).split() == ["RUNNING"]
    monkeypatch.delenv("HPCJOBS_READ_ONLY")
    run(agent, "cancel", job)
