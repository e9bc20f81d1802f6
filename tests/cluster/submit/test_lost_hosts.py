"""Hosts that die, are declared dead, or lose their network, each under a job: minutes, for Slurm waits a while."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import start
from login_node import Cluster, Submitted
from test_attempts import SLOW
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.run.progress import newest_samples
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import folder_at, recorded_daemons
from hpcjobs.slurm_commands import hosts_of

COUNT = """
import time
from hpcjobs.runtime import signals
place = signals.control_dir() / signals.PROGRESS  # whole at every moment, also that of a SIGKILL
n = int(place.read_text()) if place.exists() else 0
while n < 300:
    time.sleep(0.1)
    n += 1
    signals.write_number(signals.STEPS, n)
    if n % 10 == 0:
        signals.record_progress(n)
"""


def slurmd(host: str) -> int:
    return next(daemon.pid for daemon in recorded_daemons(folder_at(None)) if daemon.name == f"slurmd-{host}")


def network_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def kill_host(host: str) -> None:
    """SIGKILL to all that runs there, slurmd first."""
    network = network_of(slurmd(host))
    os.kill(slurmd(host), signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if network_of(process.name) == network:
                os.kill(int(process.name), signal.SIGKILL)


def link(host: str, state: str) -> None:
    subprocess.run(["nsenter", "-t", str(slurmd(host)), "-n", "ip", "link", "set", "eth0", state], check=True)


@pytest.fixture
def mended(cluster: Cluster, sandbox: Sandbox) -> Iterator[None]:
    yield
    for host in sandbox.hosts:
        with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
            link(host.name, "up")
    for host in sandbox.hosts:
        with contextlib.suppress(AssertionError):  # Slurm refuses for one that is in service
            cluster.slurm("scontrol", "update", f"nodename={host.name}", "state=resume")
    sandboxes.up(sandbox.shape)


def history(job: Submitted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]


def count(job: Submitted) -> int:
    place = job.run_dir / "control" / "progress"
    return int(place.read_text()) if place.exists() else 0


@pytest.mark.long
def test_jobs_go_on_elsewhere_when_their_host_dies_is_declared_dead_or_loses_its_network(
    cluster: Cluster, mended: None
) -> None:
    program = cluster.program("count.py", COUNT)
    jobs = [cluster.submit("--retries", "on", "--cpus-per-task", "16", program) for _ in range(3)]
    for job in jobs:
        eventually(lambda job=job: count(job) >= 20, timeout_s=120)  # type: ignore[misc]
    hosts = [job.state["nodes"] for job in jobs]
    assert len(set(hosts)) == 3
    began = time.monotonic()
    kill_host(hosts[0])
    cluster.slurm("scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=drill")
    link(hosts[2], "down")
    for job, fault in zip(jobs, ("killed", "down", "network off"), strict=True):
        answer = cluster.hpcjobs("wait", job.id, timeout_s=500)
        first, last = history(job)[0], history(job)[-1]
        print(f"{fault}: {first}; {last}; after {time.monotonic() - began:.0f} s")
        assert answer.code == 0, (answer, job.log)
        assert (last["cause"], last["steps"]) == ("completed", 300)
        # What has lost its network may come to its end all the same; nobody hears of it, and it is started again.
        assert first["cause"] == "node" or fault == "network off"
        assert first["saved"] >= 20


@pytest.mark.long
def test_a_world_that_loses_a_host_goes_on_with_those_that_are_left(cluster: Cluster, mended: None) -> None:
    cluster.program("slow.py", SLOW)
    job = cluster.submit(
        *("--retries", "on", "--launcher", "torchrun", "-N", "3", "--min-nodes", "2", "--cpus-per-task", "16"),
        "--monitor",
        *("ddp", "--workload", "slow:points", "--steps", "300", "--checkpoint-every", "10", "--log-every", "1"),
    )
    eventually(lambda: count(job) >= 20, timeout_s=120)
    began = time.monotonic()
    *left, lost = hosts_of(job.state["nodes"])
    kill_host(lost)
    cluster.slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=drill")
    lost_at = time.time()
    answer = cluster.hpcjobs("wait", job.id, timeout_s=500)
    assert answer.code == 0, (answer, job.log)
    sampled = [node.host for node in newest_samples(job.run_dir) if node.taken > lost_at + 15]
    assert sampled == left, "the nodes that are left are sampled on"
    (only,) = history(job)
    print(f"a host killed: {only}; done {time.monotonic() - began:.0f} s later")
    assert (only["cause"], only["steps"]) == ("completed", 300)
    assert "hpcjobs: 3 ranks were asked for, 2 are left\n" in job.log
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["status"]) == (2, "completed")
    assert summary["resumed_from_step"] >= 20


@pytest.mark.long
def test_an_idle_job_that_goes_on_without_a_lost_host_is_cancelled(
    cluster: Cluster, workdir: Path, mended: None
) -> None:
    script = workdir / "idle.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=3 --no-kill\nsleep 600\n")
    job = cluster.submit("--monitor", "--name", "idle", str(script))
    eventually(lambda: len(newest_samples(job.run_dir)) == 3, timeout_s=120)
    with start("monitor", "idle", "--cancel-idle", "30s", cwd=workdir) as watcher:
        hosts = hosts_of(job.state["nodes"])
        assert watcher.stdout is not None
        seen: set[str] = set()
        while seen < set(hosts):
            seen.add(watcher.stdout.readline().split()[0])
        lost = hosts[-1]
        kill_host(lost)
        cluster.slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=drill")
        out, err = watcher.communicate(timeout=300)
        assert f"cancelled {job.id}: all its nodes idle for" in out, err
        assert "no new sample from 1 of the job's 3 nodes" in err
