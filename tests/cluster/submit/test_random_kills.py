"""A training job of two nodes, of which any process is killed again and again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest
from login_node import Cluster, Submitted
from test_attempts import SLOW, losses
from waiting import eventually

KILLS, STEPS_BETWEEN = 20, 20


def processes(job: Submitted) -> dict[int, str]:
    """All processes of the job, on all hosts, with a name for the log."""
    result = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (place / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environ = (place / "environ").read_bytes().split(b"\0")
            if f"slurmstepd: [{job.id}." in arguments or f"SLURM_JOB_ID={job.id}".encode() in environ:
                result[int(place.name)] = arguments[:60]
    return result


def steps(job: Submitted) -> int:
    place = job.run_dir / "control" / "steps"
    return int(place.read_text() or 0) if place.exists() else 0


def failed(job: Submitted) -> bool:
    return (job.run_dir / "state.json").exists() and job.state["state"] == "FAILED"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_twenty_killed_processes_leave_the_losses_of_the_run_left_alone(cluster: Cluster) -> None:
    cluster.program("slow.py", SLOW)
    training = ("-N", "2", "ddp", "--workload", "slow:points", "--log-every", "1", "--checkpoint-every", "5")
    training = (*training, "--steps", str(KILLS * (STEPS_BETWEEN + 10)))
    undisturbed = cluster.submit("-t", "30m", *training)
    job = cluster.submit("-t", "30m", "--retries", "node=inf,error=0", *training)
    chance = random.Random(1)
    for number in range(1, KILLS + 1):
        target = max(steps(job), STEPS_BETWEEN * (number - 1)) + STEPS_BETWEEN
        eventually(lambda target=target: steps(job) >= target or failed(job), timeout_s=240)  # type: ignore[misc]
        assert not failed(job), job.log
        pid, arguments = chance.choice(sorted(processes(job).items()))
        print(f"kill {number} at step {steps(job)}: {arguments}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    answer = job.wait(timeout_s=400)
    for line in (job.run_dir / "attempts.jsonl").read_text().splitlines():
        attempt = json.loads(line)
        print(attempt["cause"], attempt["exit_code"], attempt["steps"], attempt["saved"], attempt["decision"])
    assert answer.code == 0, (answer, job.log)
    undisturbed.done()
    assert dict(losses(job.run_dir)) == dict(losses(undisturbed.run_dir))
