"""`ddp --comm mpi` on ranks that mpirun starts here: the losses of ddp, or ddp itself and the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("mpi4py") is None or shutil.which("mpirun") is None:
    pytest.skip("no MPI here", allow_module_level=True)

LM = ("--workload", "lm", "--steps", "10", "--log-every", "1", "--train-samples", "256", "--sequence-length", "32")
FOREIGN = ("HPCJOBS_", "SLURM_", "OMPI_", "PMIX_")


def train(folder: Path, ranks: int, *arguments: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    env |= {"OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": "1", "MASTER_PORT": "23417"}
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks))
    return subprocess.run(
        [*mpirun, sys.executable, "-m", "hpcjobs.trainers.ddp", *LM, "--batch-size", "4", "--run-dir", folder,
         *arguments],
        env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks that own their cores need two")
def test_gradients_over_mpi_give_the_losses_of_ddp(tmp_path: Path) -> None:
    for comm in ("group", "mpi"):
        done = train(tmp_path / comm, 2, "--accumulate", "2", "--clip-norm", "0.5", "--comm", comm)
        assert done.returncode == 0, done
    assert "--comm mpi: gradients are summed by Open MPI" in done.stdout
    assert json.loads((tmp_path / "mpi" / "summary.json").read_text())["backend"] == "mpi"
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "group"), rel=1e-5)


@pytest.mark.timeout(600)
def test_where_ranks_share_cores_ddp_itself_is_used_and_that_is_said(tmp_path: Path) -> None:
    done = train(tmp_path / "run", 2, "--comm", "mpi", "--steps", "1", threads=len(os.sched_getaffinity(0)))
    assert done.returncode == 0, done
    assert "--comm mpi: ranks share cores; gradients travel by gloo" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["backend"] == "gloo"
