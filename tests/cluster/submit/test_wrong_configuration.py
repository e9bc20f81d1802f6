"""A script of one's own whose ranks use the same GPU, on a real Slurm, with a budget for errors."""

from __future__ import annotations

import json

import pytest
from login_node import Cluster

DUPLICATE = """
import os
import sys
import time

if os.environ["RANK"] == "0":
    time.sleep(60)
error = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\\nLast error:\\n"
sys.exit(error + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000")
"""


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "torchrun"])
def test_its_job_ends_with_the_reason_and_is_not_queued_again(launcher: str, cluster: Cluster) -> None:
    script = cluster.program("train.py", DUPLICATE)
    options = ("-N", "2", "--ntasks-per-node", "1", "-c", "1", "-t", "5m", "--launcher", launcher)
    job = cluster.submit(*options, "--retries", "error=3,node=0", script)
    assert job.wait().code != 0
    attempts = [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["decision"] for attempt in attempts] == [
        "ended: the configuration cannot work, and another attempt would meet the same: Two ranks use the same GPU"
    ], job.log
