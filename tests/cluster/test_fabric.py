"""Nodes that are slow or cut off, found by measuring: on a real Slurm whose network is made worse on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commandline import Answer, hpcjobs

from hpcjobs.fabric.check import QUICK_S
from hpcjobs.sandbox import Sandbox, status
from hpcjobs.sandbox.folder import folder_at
from hpcjobs.sandbox.network import enter
from hpcjobs.site.machine import current_sandbox


@pytest.fixture
def folder(sandbox: Sandbox, workdir: Path) -> Path:
    """A login node's folder, which every host sees."""
    return workdir


@contextmanager
def on(sandbox: Sandbox, host: str, worse: str, better: str) -> Iterator[None]:
    """``worse`` run on a host, and undone by ``better``."""
    (there,) = [each for each in sandbox.hosts if each.name == host]
    arguments = enter(folder_at(None), there)
    subprocess.run([*arguments, *worse.split()], check=True)
    try:
        yield
    finally:
        subprocess.run([*arguments, *better.split()], check=True)


def run_dir(name: str) -> Path:
    (path,) = Path("runs").glob(f"{name}-2*")
    return path


def report(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir(name) / "fabric.json").read_text(encoding="utf-8"))
    return document


def log(name: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((run_dir(name) / "logs").iterdir()))


def submit(*arguments: str) -> Answer:
    return hpcjobs("submit", "--wait", *arguments, timeout_s=280)


SLOW = ("tc qdisc add dev eth0 root tbf rate 20mbit burst 64kbit latency 200ms", "tc qdisc del dev eth0 root")
SPARE = ("-N", "2", "--spare", "1", "-o", "nodelist=tu[01-03]", "-J", "j")


@pytest.mark.timeout(400)
def test_a_node_with_a_slow_network_is_named_and_a_spare_one_takes_its_place(sandbox: Sandbox, folder: Path) -> None:
    with on(sandbox, "tu02", *SLOW):
        ended = submit("--site", "tu-hpc", *SPARE, "hostname")
    assert ended.code == 0, (ended, log("j"))
    verdicts = {node["host"]: node for node in report("j")["nodes"]}
    assert verdicts["tu02"]["verdict"] == "bad"
    assert any("sends at" in reason for reason in verdicts["tu02"]["reasons"])
    assert verdicts["tu02"]["network_bytes_per_s"] == pytest.approx(20e6 / 8, rel=0.3)
    assert verdicts["tu01"]["network_bytes_per_s"] > 20e6
    assert "hpcjobs: runs on tu01, tu03, without tu02" in log("j")
    assert {"0: tu01", "1: tu03"} <= set(log("j").splitlines())
    later = hpcjobs("submit", "--site", "tu-hpc", "-N", "2", "--dry-run", "hostname")
    assert "hpcjobs: leaves out tu02: " in later.err
    assert "#SBATCH --exclude=" in later.out


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "horovod-gloo"])
def test_the_job_scripts_own_node_may_be_the_one_that_is_left_out(
    launcher: str, sandbox: Sandbox, folder: Path
) -> None:
    trainer = "ddp" if launcher == "torchrun" else "horovod"
    with on(sandbox, "tu01", *SLOW):
        ended = submit(
            "--site", "tu-hpc", *SPARE, "--launcher", launcher, trainer, "--workload", "mnist", "--steps", "5"
        )
    assert ended.code == 0, (ended, log("j"))
    assert "hpcjobs: runs on tu02, tu03, without tu01" in log("j")
    summary = json.loads((run_dir("j") / "summary.json").read_text(encoding="utf-8"))
    assert (summary["world_size"], summary["hosts"]) == (2, ["tu02", "tu03"])


@pytest.mark.timeout(400)
def test_a_node_whose_interface_is_down_is_named_and_not_waited_for(sandbox: Sandbox, folder: Path) -> None:
    with on(sandbox, "tu04", "ip link set eth0 down", "ip link set eth0 up"):
        ended = hpcjobs("fabric", "--site", "tu-hpc", "-w", "tu[03-04]", "-N", "2", "--quick", timeout_s=200)
    assert ended.code == 19, ended
    assert "hpcjobs: bad: tu04" in ended.out
    assert report("fabric")["took_s"] < 2 * QUICK_S  # a minute on a machine that is not busy
    give_back("tu04")


def give_back(host: str) -> None:
    """Until Slurm has the node again for the tests that follow: one it has given up comes back when it is told to."""
    record = current_sandbox()
    assert record is not None
    resume = ["scontrol", "update", f"nodename={host}", "state=resume"]
    while (state := status().nodes[host]) not in ("idle", "mixed", "allocated"):
        if state.startswith("down"):
            subprocess.run(resume, env={**os.environ, "SLURM_CONF": record.slurm_conf}, check=True)
        time.sleep(0.5)


@pytest.mark.timeout(400)
def test_the_matrix_program_prints_the_formulas_value_and_refuses_a_wrong_mpi_type(
    folder: Path, site_of_mpi: Callable[[str], str]
) -> None:
    layout = ("-N", "2", "--ntasks-per-node", "2")
    ended = submit("--site", "tu-hpc", *layout, "-J", "right", "hpcjobs.fabric.matmul", "--size", "256")
    assert ended.code == 0, (ended, log("right"))
    assert "sum over 4 ranks, N=256: 83886080.00" in log("right")  # 256^3 * 0.5 * (1 + 2 + 3 + 4)
    wrong = site_of_mpi("none")
    ended = submit("--site", wrong, *layout, "-J", "wrong", "hpcjobs.fabric.matmul")
    assert ended.code != 0
    assert "sum over" not in log("wrong")
    assert "not built with SLURM's PMI support" in " ".join(log("wrong").split()) or "MPI sees 1 of 4" in log("wrong")
