"""Which cores and GPUs ranks have on a Slurm that binds tasks (TaskPlugin=task/affinity), by each key of `affinity`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok
from shared import shared_folder
from unlike.changing import NO_ACCOUNTING

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox, Shape

CPUS = sorted(os.sched_getaffinity(0))[:2]
"""Of each host: tasks can be bound to cores that this machine has."""
SITE = {"partitions": {"gpu": {"nodes": 2, "node": {"cpus": 2, "mem": "2G", "gpus": 2}}}, "defaults": {"time": "5m"}}
PROGRAM = """
import json, os
names = ("RANK", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
print("found", json.dumps([*map(os.environ.get, names), sorted(os.sched_getaffinity(0))]))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    if CPUS != [0, 1]:
        pytest.skip("a host of this sandbox is cores 0 and 1")
    with shared_folder() as folder:
        (folder / "bound.yaml").write_text(json.dumps(SITE))
        settings = {**NO_ACCOUNTING, "TaskPlugin": "task/affinity"}
        try:
            yield sandboxes.up(Shape(like=str(folder / "bound.yaml"), settings=settings))
        finally:
            sandboxes.down()


def run_ranks(
    sandbox: Sandbox, folder: Path, affinity: dict[str, str], *options: str, gpus: int = 2
) -> list[tuple[str, str | None, list[int]]]:
    """Two ranks on each of two hosts with a core a rank: the host, the GPUs and the cores of each."""
    site = folder / "bound.yaml"
    site.write_text(json.dumps({**SITE, "slurm_conf": sandbox.slurm_conf, "affinity": affinity}))
    (folder / "program.py").write_text(PROGRAM)
    layout = ("-N", "2", "--ntasks-per-node", "2", "-c", "1", *(("--gpus-per-node", str(gpus)) if gpus else ()))
    log = ok("submit", "--site", str(site), "--follow", *layout, *options, sys.executable, "program.py").out
    placed = sorted(json.loads(line.partition("found ")[2]) for line in log.splitlines() if "found " in line)
    assert [int(rank) for rank, *_ in placed] == [0, 1, 2, 3], log
    return [(host, devices, cores) for _, host, devices, cores in placed]


A, B, BOTH = [0], [1], [0, 1]


@pytest.mark.parametrize(
    ("key", "value", "cores"),
    [
        ("cpu_bind", None, [A, B, A, B]),  # cores, the default with GPUs
        ("cpu_bind", "none", [BOTH] * 4),
        ("cpu_bind", "sockets", [BOTH] * 4),
        ("cpu_bind", "map_cpu:1,0", [B, A, B, A]),
        ("cpu_bind", "verbose,mask_cpu:0x2,0x1", [B, A, B, A]),
        ("distribution", "block:fcyclic,Pack", [A, B, A, B]),
    ],
)
def test_srun_binds_each_rank_to_the_cores_that_the_site_names(
    key: str, value: str | None, cores: list[list[int]], sandbox: Sandbox, workdir: Path
) -> None:
    ranks = run_ranks(sandbox, workdir, {} if value is None else {key: value})
    assert ranks == [
        (host, "0,1", own) for host, own in zip(["bound01", "bound01", "bound02", "bound02"], cores, strict=True)
    ]


def test_srun_distributes_ranks_over_the_nodes_as_the_site_says(sandbox: Sandbox, workdir: Path) -> None:
    ranks = run_ranks(sandbox, workdir, {"distribution": "cyclic:cyclic"})
    assert [(host, cores) for host, _, cores in ranks] == [
        ("bound01", A), ("bound02", A), ("bound01", B), ("bound02", B),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "devices"),
    [("map_gpu:1,0", ["1", "0"]), ("single:1", ["0", "1"]), ("per_task:1", ["0", "1"]), ("closest", ["0,1", "0,1"])],
)
def test_srun_shows_each_rank_the_gpus_that_the_site_names(
    value: str, devices: list[str], sandbox: Sandbox, workdir: Path
) -> None:
    ranks = run_ranks(sandbox, workdir, {"gpu_bind": value})
    assert [(own, cores) for _, own, cores in ranks] == [(own, [n]) for n, own in enumerate(devices)] * 2


@pytest.mark.parametrize(("value", "cores"), [(None, [BOTH] * 4), ("core", [A, B, A, B]), ("socket", [BOTH] * 4)])
def test_mpirun_binds_each_rank_as_the_site_says(
    value: str | None, cores: list[list[int]], sandbox: Sandbox, workdir: Path
) -> None:
    ranks = run_ranks(sandbox, workdir, {} if value is None else {"mpirun_bind_to": value}, "--launcher", "mpirun")
    assert [own for *_, own in ranks] == cores


def test_ranks_of_torchrun_have_all_cores_of_their_job_on_the_node(sandbox: Sandbox, workdir: Path) -> None:
    ranks = run_ranks(sandbox, workdir, {}, "--launcher", "torchrun")
    assert [own for *_, own in ranks] == [BOTH] * 4


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_without_gpus_runs_on_a_site_that_binds_gpus(launcher: str, sandbox: Sandbox, workdir: Path) -> None:
    affinity = {"gpu_bind": "map_gpu:1,0", "numa_binding": "node"}
    ranks = run_ranks(sandbox, workdir, affinity, "--launcher", launcher, gpus=0)
    assert [devices for _, devices, _ in ranks] == [None] * 4
