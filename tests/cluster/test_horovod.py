"""Horovod over the hosts of a real Slurm, by every way to start it: one world, the losses of ddp."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs
from run_folders import log, losses, summary

from hpcjobs.sandbox import Sandbox

if find_spec("horovod") is None:
    pytest.skip("Horovod is not installed (make horovod)", allow_module_level=True)

LM = ("--workload", "lm", "--sequence-length", "32", "--train-samples", "512", "--batch-size", "4", "--log-every", "1")
WITHOUT_PMIX = ("mpirun", "horovod-gloo")
TWO_NODES = ("--site", "tu-hpc", "-N", "2", "--ntasks-per-node")
PROGRAM = """
import socket
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print("rank", hvd.rank(), "of", hvd.size(), "local", hvd.local_rank(), "of", hvd.local_size(),
      "sum", int(total), "on", socket.gethostname())
"""


@pytest.fixture
def folder(sandbox: Sandbox, workdir: Path) -> Path:
    """A login node's folder, which every host sees."""
    return workdir


def submit(*arguments: str) -> Answer:
    return hpcjobs("submit", *arguments, timeout_s=280)


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("tasks", ["1", pytest.param("4", marks=pytest.mark.long)])
def test_every_way_to_start_gives_one_world_with_the_losses_of_ddp(tasks: str, folder: Path) -> None:
    lm = (*LM, "--steps", "16")
    ended = submit(*TWO_NODES, tasks, "--name", "ddp", "--wait", "ddp", *lm)
    assert ended.code == 0, (ended, log("ddp"))
    for launcher, backend, *trainer in (
        ("srun", "horovod-mpi", "horovod"),
        ("mpirun", "horovod-mpi", "horovod"),
        ("horovod-gloo", "horovod-gloo", "horovod"),
        ("srun", "horovod-mpi", "lightning", "--strategy", "horovod"),
    ):
        name = f"{trainer[0]}-{launcher}"
        ended = submit(*TWO_NODES, tasks, "--launcher", launcher, "--name", name, "--wait", *trainer, *lm)
        assert ended.code == 0, (ended, log(name))
        run_summary = summary(name)
        assert (run_summary["world_size"], run_summary["nnodes"], run_summary["backend"]) == (
            2 * int(tasks),
            2,
            backend,
        )
        assert losses(name) == pytest.approx(losses("ddp"), rel=2e-4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["srun", *(pytest.param(name, marks=pytest.mark.long) for name in WITHOUT_PMIX)])
def test_a_program_of_ones_own_is_one_world_too(launcher: str, folder: Path) -> None:
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    ended = submit(*TWO_NODES, "2", "--launcher", launcher, "--name", "own", "--wait", "train.py")
    assert ended.code == 0, (ended, log("own"))
    printed_lines = sorted(line for line in log("own").splitlines() if " sum " in line)
    hosts = [line.rpartition(" ")[2] for line in printed_lines]
    assert printed_lines == [f"{n}: rank {n} of 4 local {n % 2} of 2 sum 10 on {hosts[n]}" for n in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_horovodrun_starts_the_ranks_of_one_node_without_ssh(folder: Path) -> None:
    arguments = (
        "--launcher",
        "horovodrun",
        "--name",
        "own",
        "--wait",
        "bash",
        "-c",
        'echo "rank $RANK of $WORLD_SIZE"',
    )
    ended = submit("--site", "tu-hpc", "--ntasks-per-node", "2", *arguments)
    assert ended.code == 0, (ended, log("own"))
    assert sorted(line for line in log("own").splitlines() if " of 2" in line) == ["0: rank 0 of 2", "1: rank 1 of 2"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_a_wrong_mpi_type_fails_at_once_and_is_named(mpi: str, folder: Path, site_of_mpi: Callable[[str], str]) -> None:
    wrong = site_of_mpi(mpi)
    layout = ("--site", wrong, "-N", "2", "--ntasks-per-node", "1", "--name", "wrong", "--wait")
    ended = submit(*layout, "horovod", *LM, "--controller", "mpi")
    assert ended.code == 10, ended
    assert f"srun --mpi={mpi} does not speak to Open MPI" in log("wrong")
    assert "mpi: pmix in the site file" in log("wrong")


@pytest.mark.timeout(600)
def test_where_srun_does_not_speak_to_mpi_gloo_is_taken_and_that_is_said(
    folder: Path, site_of_mpi: Callable[[str], str]
) -> None:
    wrong = site_of_mpi("none")
    layout = ("--site", wrong, "-N", "2", "--ntasks-per-node", "1", "--name", "gloo", "--wait")
    ended = submit(*layout, "horovod", *LM, "--steps", "2")
    assert ended.code == 0, (ended, log("gloo"))
    assert "Horovod: 2 ranks over Gloo (srun --mpi=none does not speak to Open MPI" in log("gloo")
