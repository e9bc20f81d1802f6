"""Training over the hosts of a real Slurm."""

from __future__ import annotations

import json

import pytest
from login_node import Cluster
from waiting import eventually

PLAIN = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
assert "RANK" in os.environ and int(os.environ["LOCAL_WORLD_SIZE"]) == 2
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(total), "node", os.environ.get("NODE_RANK"),
      "on", socket.gethostname())
dist.destroy_process_group()
"""

FAILING = """
import os, sys, time
if os.environ["RANK"] == "5":
    print("rank 5 gives up")
    sys.exit(7)
time.sleep(600)
"""


@pytest.mark.long  # docs/sandbox.md does the same in make test
def test_mnist_learns_on_four_hosts_and_the_accounting_says_completed(cluster: Cluster) -> None:
    began = cluster.hpcjobs(
        *("submit", "--site", "tu-hpc", "-N", "4", "--ntasks-per-node", "2", "--wait"),
        *("ddp", "--workload", "mnist", "--epochs", "3"),
    )
    assert began.code == 0, began
    (run_dir,) = (cluster.folder / "runs").glob("ddp-*")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world_size"] == 8
    assert len(set(summary["hosts"])) == 4
    assert summary["evaluation"]["accuracy"] > 0.9
    (row,) = cluster.rows()
    assert (row["record"]["state"], row["record"]["source"]) == ("COMPLETED", "sacct")


def test_a_plain_script_is_a_world_of_eight_under_both_launchers_on_the_same_nodes(cluster: Cluster) -> None:
    program = cluster.program("train.py", PLAIN)
    layout = ("-N", "4", "--ntasks-per-node", "2")
    jobs = [cluster.submit(*layout, "--launcher", launcher, program) for launcher in ("srun", "torchrun")]
    for job in jobs:
        job.done()
        for rank in range(8):
            assert f"{rank}: rank {rank} of 8 sum 36 node {rank // 2} on tu0{rank // 2 + 1}\n" in job.log
    answer = cluster.hpcjobs("logs", "--rank", "5", jobs[0].id).out
    assert answer.splitlines() == ["rank 5 of 8 sum 36 node 2 on tu03"]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_failing_rank_ends_the_job_and_is_named_with_its_host(cluster: Cluster, launcher: str) -> None:
    program = cluster.program("fail.py", FAILING)
    job = cluster.submit("-N", "3", "--ntasks-per-node", "2", "--launcher", launcher, program)
    answer = job.wait()
    assert answer.code == 7
    assert (
        job.state["ended"] - (job.run_dir / "first_failure").stat().st_mtime < 300
    )  # the others would sleep for 600 s
    assert "first failure: rank 5 on tu03" in answer.err
    logs = cluster.hpcjobs("logs", job.id).out
    assert "5: rank 5 gives up" in logs
    assert "rank 5 on tu03 ended with exit code 7" in logs
    assert job.state["first_failure"] == {"rank": 5, "host": "tu03", "exit_code": 7}
    eventually(lambda: job.sacct() == {job.id: "FAILED"})
