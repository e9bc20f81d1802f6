"""Submitting where another job's settings lie about, and jobs side by side on one node."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import pytest
from commandline import start
from login_node import Cluster, Submitted
from waiting import eventually

SHOW_ENVIRONMENT = """
import json, os, pathlib
place = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / f"rank{os.environ['RANK']}.json"
place.write_text(json.dumps(dict(os.environ)))
"""

# What an enclosing job leaves that would change the new one, were it passed on.
LEFT_BEHIND = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_NTASKS": "64",
    "SLURM_NTASKS_PER_NODE": "64",
    "SLURM_CPUS_PER_TASK": "9",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_CPUS_PER_TASK": "9",
    "SRUN_CPUS_PER_TASK": "9",
    "RANK": "63",
    "LOCAL_RANK": "63",
    "WORLD_SIZE": "64",
    "MASTER_ADDR": "nowhere",
    "MASTER_PORT": "1",
    "PMIX_RANK": "63",
    "OMPI_COMM_WORLD_RANK": "63",
    "GROUP_RANK": "31",
    "TORCHELASTIC_RUN_ID": "other",
}
LAYOUT = ("-N", "2", "--ntasks-per-node", "2", "-c", "1", "--name", "show")

HOLD_PORT = """
import os, pathlib, socket, sys, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
meeting = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    server = socket.create_server(("", address[1]))
    (meeting / os.environ["HPCJOBS_JOB_ID"]).write_text(f"{socket.gethostname()} {address[1]}")
    server.accept()[0].sendall(b"hello from " + os.environ["HPCJOBS_JOB_ID"].encode())
else:
    while len(list(meeting.iterdir())) < 2:
        time.sleep(0.1)
    print(socket.create_connection(address).recv(100).decode())
"""


def environment_of(job: Submitted, rank: int) -> dict[str, Any]:
    variables: dict[str, Any] = json.loads((job.run_dir / f"rank{rank}.json").read_text())
    return variables


def assert_same_world(inside: Submitted, clean: Submitted) -> None:
    """The names the tasks see are the same, and so are the values that say where a task stands."""
    name_parts = ("NTASKS", "CPU", "RANK", "WORLD", "NNODES", "DIST", "BIND", "TASKS", "PROCID", "LOCALID", "EXPORT")
    for rank in range(4):
        variables, expected = environment_of(inside, rank), environment_of(clean, rank)
        # Where a shell has the module function already, Environment Modules does not begin anew.
        assert set(variables) | {"__MODULES_LMINIT"} == set(expected) | {"__MODULES_LMINIT"}
        for name in expected:
            if any(part in name for part in name_parts):
                assert variables[name] == expected[name], name


@pytest.fixture
def clean(cluster: Cluster) -> Submitted:
    return cluster.submit(*LAYOUT, cluster.program("show.py", SHOW_ENVIRONMENT)).done()


def test_a_job_submitted_from_an_salloc_shell_takes_nothing_of_it_along(cluster: Cluster, clean: Submitted) -> None:
    submit = [sys.executable, "-m", "hpcjobs", "submit", "--site", "tu-hpc", "--json", *LAYOUT, "show.py"]
    within = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in LEFT_BEHIND.items())
    out = cluster.slurm("salloc", "-Q", "-N", "3", "-n", "6", "bash", "-c", f"{within}; exec {shlex.join(submit)}")
    assert_same_world(cluster.took(out).done(), clean)


def test_a_job_submitted_from_inside_a_job_takes_nothing_of_it_along(cluster: Cluster, clean: Submitted) -> None:
    submit = [sys.executable, "-m", "hpcjobs", "submit", "--site", "tu-hpc", "--json", *LAYOUT, "show.py"]
    outer = cluster.submit(
        *("-N", "1", "--ntasks-per-node", "1", "-c", "3", "--name", "outer", "--env", "OUTER_ONLY=1"),
        *("env", "-u", "OUTER_ONLY", "SLURM_CPU_BIND=mask_cpu:0x1", *submit),
    ).done()
    assert_same_world(cluster.took(outer.log).done(), clean)


def test_two_jobs_on_one_node_at_the_same_time_have_ports_of_their_own(cluster: Cluster) -> None:
    program = cluster.program("port.py", HOLD_PORT)
    meeting = cluster.folder / "meeting"
    meeting.mkdir()
    arguments = ("--ntasks-per-node", "2", "-o", "nodelist=tu02", program, str(meeting))
    jobs = [cluster.submit(*arguments) for _ in range(2)]
    for job in jobs:
        assert f"1: hello from {job.id}\n" in job.done().log
    places = [(meeting / job.id).read_text().split() for job in jobs]
    assert {host for host, _ in places} == {"tu02"}
    assert places[0][1] != places[1][1]


def test_fifty_submissions_at_once_lose_no_record(cluster: Cluster) -> None:
    began = [
        start("submit", "--site", "tu-hpc", "--json", "-o", "hold", "--name", f"many{n}", "true") for n in range(50)
    ]
    outputs = [process.communicate(timeout=400) for process in began]
    assert [process.returncode for process in began] == [0] * 50, [err for _, err in outputs if err]
    ids = {cluster.took(out).id for out, _ in outputs}
    assert len(ids) == 50
    shown = cluster.rows()
    assert {row["record"]["job_id"] for row in shown} == ids
    assert len({row["run_dir"] for row in shown}) == 50
    assert cluster.hpcjobs("cancel", f"{min(ids, key=int)}-{max(ids, key=int)}").code == 0
    eventually(lambda: not ids & set(cluster.slurm("squeue", "-h", "--me", "-o", "%i").split()))
