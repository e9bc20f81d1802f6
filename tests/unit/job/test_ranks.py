"""rank.sh: the rank of a task from the variables of whoever started it, and what the program sees of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcjobs.data import data_folder

SHELL = data_folder("templates") / "shell"
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "8", "SLURMD_NODENAME": "n3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_RANK": "5", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_CROSS_RANK": "2",
    "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_SIZE": "2",
}  # fmt: skip
TORCH = {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
SHOW = "echo $RANK $LOCAL_RANK $NODE_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE ${OMPI_MCA_mpi_yield_when_idle:-} "
SHOW += "${HOROVOD_RANK:-} ${HOROVOD_HOSTNAME:-}"


def rank(
    launched_by: str, given: dict[str, str], folder: Path, *options: str, program: str = SHOW, threads: int = 1
) -> subprocess.CompletedProcess[str]:
    """One task, whose launcher set ``given``."""
    env = {"PATH": os.environ["PATH"], "HPCJOBS_SCHEDULER": "slurm", "HPCJOBS_LAUNCHED_BY": launched_by}
    env |= {
        "HPCJOBS_NTASKS": "8",
        "HPCJOBS_NNODES": "4",
        "HPCJOBS_NTASKS_PER_NODE": "2",
        "HPCJOBS_RUN_DIR": str(folder),
        "OMP_NUM_THREADS": str(threads),
    }
    env |= given
    arguments = ["bash", SHELL / "rank.sh", *options, "--", "bash", "-c", program]
    return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("launched_by", "given", "more"),
    [
        ("srun", SLURM, ""),
        ("srun --mpi=pmix", SLURM, ""),
        ("torchrun", TORCH, ""),
        ("mpirun", OPEN_MPI, ""),
        ("horovodrun", HOROVOD, " 5"),
        ("horovod-gloo", SLURM, " 5 n3"),
    ],
)
def test_every_launcher_gives_a_task_the_same_rank(
    launched_by: str, given: dict[str, str], more: str, tmp_path: Path
) -> None:
    done = rank(launched_by, given, tmp_path, threads=0)
    assert (done.stdout, done.stderr, done.returncode) == (f"5 1 2 8 2{more}\n", "", 0)


@pytest.mark.parametrize(
    ("launched_by", "given", "yields"),
    [("srun --mpi=pmix", SLURM, "1"), ("mpirun", OPEN_MPI, "1"), ("srun", SLURM, "")],
)
def test_ranks_of_open_mpi_that_outnumber_the_cpus_yield(
    launched_by: str, given: dict[str, str], yields: str, tmp_path: Path
) -> None:
    show = "echo $OMPI_MCA_mpi_yield_when_idle"
    assert rank(launched_by, given, tmp_path, program=show, threads=10_000).stdout == f"{yields}\n"
    assert rank(launched_by, given, tmp_path, program=show, threads=0).stdout == "\n"


def test_a_world_of_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    done = rank("srun", SLURM | {"SLURM_NTASKS": "1"}, tmp_path)
    assert done.returncode == 10
    assert "WORLD_SIZE is 1, expected 8; started by srun" in done.stderr


def test_an_elastic_world_may_be_smaller_and_the_program_sees_its_size(tmp_path: Path) -> None:
    smaller = TORCH | {"RANK": "0", "WORLD_SIZE": "6"}
    done = rank("torchrun", smaller, tmp_path, "--min-tasks=4", program="echo $HPCJOBS_NTASKS $HPCJOBS_NNODES")
    assert done.stdout == "6 3\n"
    assert "8 ranks were asked for, 6 are left" in done.stderr
    assert rank("torchrun", smaller, tmp_path, "--min-tasks=7").returncode == 10


def test_lines_are_labelled_and_the_first_failure_is_recorded_once(tmp_path: Path) -> None:
    done = rank("torchrun", TORCH, tmp_path, "--label", program="echo one; echo two >&2; exit 7")
    assert done.stdout == "5: one\n5: two\n"
    assert done.returncode == 7
    rank("torchrun", TORCH | {"RANK": "6"}, tmp_path, program="exit 8")
    assert (tmp_path / "first_failure").read_text().split()[:2] == ["7", "5"]


@pytest.mark.parametrize(("code", "restart", "runs"), [(1, 2, True), (1, 4, False), (23, 1, False)])
def test_an_agent_that_restarts_ranks_meets_errors_as_often_as_their_budget_and_a_wrong_configuration_once(
    code: int, restart: int, runs: bool, tmp_path: Path
) -> None:
    assert rank("torchrun", TORCH, tmp_path, "--max-errors=3", program=f"exit {code}").returncode == code
    again = TORCH | {"TORCHELASTIC_RESTART_COUNT": str(restart)}
    done = rank("torchrun", again, tmp_path, "--max-errors=3", program="echo ran")
    assert (done.stdout == "ran\n", done.returncode) == (runs, 0 if runs else code)


def test_local_jobs_of_two_queues_with_one_number_start_at_different_ports(tmp_path: Path) -> None:
    """Both may look for a free port before either listens; their jobs have the same number."""
    common = f". {SHELL / 'common.bash'}; free_port"
    env = {"PATH": os.environ["PATH"], "HPCJOBS_SCHEDULER": "local", "HPCJOBS_JOB_ID": "1"}
    jobs = [subprocess.Popen(["bash", "-c", common], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = [int(job.communicate(timeout=60)[0]) for job in jobs]
    assert ports[0] != ports[1]
    assert all(15000 <= port < 31100 for port in ports)
