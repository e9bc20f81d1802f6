"""Jobs that outlive what ends them, on a real Slurm. They all begin together: each waits for its requeue anyway."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from login_node import Cluster, Submitted
from waiting import eventually

COUNT = """
import os, pathlib, sys, time
from hpcjobs.runtime import signals

stop = signals.listen()
place = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / ("count-" + os.environ["RANK"])
n = int(place.read_text()) if place.exists() else 0
print("begins at", n, flush=True)
while n < 200:
    time.sleep(0.1)
    n += n < 100 or place.exists()  # a first start waits for its fate, however long a busy machine takes
    signals.write_number(signals.STEPS, n)
    if stop.requested:
        place.write_text(str(n))
        signals.leave(n)
"""
STUCK = """
import time
from hpcjobs.runtime import signals
stop = signals.listen()
while not stop.requested:
    time.sleep(0.1)
signals.leave(5)
"""
FAILS_AFTER_PREEMPTION = COUNT.replace("while n < 200", "if n: sys.exit(7)\nwhile n < 200")
KILLED = """
import os, pathlib, signal, socket
hosts = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"], "hosts")
with hosts.open("a") as file:
    file.write(socket.gethostname() + "\\n")
if len(hosts.read_text().split()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
SLOW = """
import time
from dataclasses import replace
import torch
from torch import nn
from hpcjobs.trainers.workloads.base import Workload, classification_score

class Points:
    def __len__(self): return 64
    def read_batch(self, indices):
        label = torch.as_tensor(indices) % 2
        return torch.stack([label * 2.0 - 1.0, label * 0.5], dim=-1), label

def loss(model, batch):
    time.sleep(0.05)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def points(config):
    return Workload(name="points", unit="points", units_per_sample=1, flops_per_sample=12.0,
                    build_model=lambda: nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, 2)),
                    loss=loss, evaluate=classification_score, train=Points(), held_out=Points(), batch_size=4, lr=0.01)
"""
TRAINING = ("-N", "2", "ddp", "--workload", "slow:points", "--steps", "100", "--log-every", "1")


@dataclass(frozen=True)
class Begun:
    signalled: Submitted
    forbidden: Submitted
    stuck: Submitted
    killed: Submitted
    trained: Submitted
    undisturbed: Submitted
    preempted: Submitted
    failed: Submitted


@pytest.fixture
def begun(cluster: Cluster) -> Begun:
    """One of each, and what each is to get: a signal, or a job of higher priority on its node."""
    texts = {"count.py": COUNT, "fails.py": FAILS_AFTER_PREEMPTION, "stuck.py": STUCK, "killed.py": KILLED}
    count, fails, stuck, killed = (cluster.program(name, text) for name, text in texts.items())
    cluster.program("slow.py", SLOW)
    whole_node = ("--cpus-per-task", "16")
    jobs = Begun(
        preempted=cluster.submit("--retries", "on", "-p", "scavenger", *whole_node, count),
        failed=cluster.submit("--retries", "on", "-p", "scavenger", *whole_node, fails),
        signalled=cluster.submit("--retries", "on", "-N", "2", count),
        forbidden=cluster.submit("--retries", "on", count),
        stuck=cluster.submit("--retries", "on", "-t", "1m", "--signal-before", "45s", stuck),
        killed=cluster.submit("--retries", "on", killed),
        trained=cluster.submit("--retries", "on", *TRAINING),
        undisturbed=cluster.submit(*TRAINING),
    )
    cluster.slurm("scontrol", "update", f"JobId={jobs.forbidden.id}", "Requeue=0")

    def tell(job: Submitted) -> None:
        cluster.slurm("scancel", "--signal=USR1", job.id)

    def take(job: Submitted) -> None:
        cluster.submit("-p", "compute", "-o", f"nodelist={job.state['nodes']}", *whole_node, "true")

    fates = {"signalled": tell, "forbidden": tell, "trained": tell, "preempted": take, "failed": take}

    def all_have_met_theirs() -> bool:
        for name in [name for name in fates if steps(getattr(jobs, name)) >= 10]:
            fates.pop(name)(getattr(jobs, name))
        return not fates

    eventually(all_have_met_theirs, timeout_s=400)
    return jobs


def steps(job: Submitted) -> int:
    place = job.run_dir / "control" / "steps"
    return int(place.read_text() or 0) if place.exists() else 0


def history(job: Submitted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] in ("step", "evaluation")]


def test_a_job_goes_on_after_what_ended_it_and_is_one_job_to_its_user(cluster: Cluster, begun: Begun) -> None:
    answer = begun.signalled.wait()
    assert answer.code == 0, (answer, begun.signalled.log)
    first, last = history(begun.signalled)
    assert (first["cause"], first["decision"], first["steps"] - first["saved"]) == ("preempt", "requeued", 0)
    assert (last["cause"], last["steps"]) == ("completed", 200)
    assert f"0: begins at {(begun.signalled.run_dir / 'count-0').read_text()}\n" in begun.signalled.log
    shown = cluster.hpcjobs("show", begun.signalled.id).out
    assert f"preempt at step {first['steps']}; requeued\n" in shown

    assert begun.forbidden.wait().code == 0
    first, last = history(begun.forbidden)
    assert first["decision"] == f"resubmitted as {last['job_id']}"
    (row,) = [row for row in cluster.rows() if row["run_dir"] == str(begun.forbidden.run_dir)]
    assert (row["record"]["job_id"], row["record"]["state"]) == (begun.forbidden.id, "COMPLETED")

    begun.preempted.done()
    first, last = history(begun.preempted)
    assert (first["cause"], first["steps"] - first["saved"], last["steps"]) == ("preempt", 0, 200)
    assert first["steps"] >= 10

    begun.killed.done()
    first, last = history(begun.killed)
    assert (first["cause"], first["exit_code"], last["cause"]) == ("node", 137, "completed")
    bad, other = (begun.killed.run_dir / "hosts").read_text().split()
    assert bad != other
    assert f"the next start does without {bad}\n" in begun.killed.log

    assert begun.trained.wait().code == 0, begun.trained.log
    begun.undisturbed.done()
    assert [line["steps"] - line["saved"] for line in history(begun.trained)][:1] == [0]
    assert len(losses(begun.undisturbed.run_dir)) > 100
    assert losses(begun.trained.run_dir) == losses(begun.undisturbed.run_dir)

    answer = begun.stuck.wait()
    assert answer.code == 85
    assert "after 2 attempts ended: no progress" in answer.err
    assert [line["cause"] for line in history(begun.stuck)] == ["timeout", "timeout"]

    assert begun.failed.wait().code == 7
    eventually(lambda: begun.failed.id not in cluster.slurm("squeue", "-h", "--me", "-o", "%i").split())
    assert [line["cause"] for line in history(begun.failed)] == ["preempt", "error"], "Slurm may start it once more"
