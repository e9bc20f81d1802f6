"""`ddp --comm mpi` over two hosts of a real Slurm: MPI between them, or gloo and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import hpcjobs
from run_folders import losses, run_dir

from hpcjobs.sandbox import Sandbox

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

LM = ("--workload", "lm", "--sequence-length", "32", "--steps", "10", "--train-samples", "512", "--batch-size", "4")
LAYOUT = ("--site", "tu-hpc", "-N", "2", "--wait")


@pytest.mark.timeout(600)
def test_gradients_over_mpi_between_two_hosts_give_the_losses_of_ddp(sandbox: Sandbox, workdir: Path) -> None:
    for comm in ("group", "mpi"):
        ended = hpcjobs("submit", *LAYOUT, "-J", comm, "ddp", *LM, "--log-every", "1", "--comm", comm, timeout_s=280)
        assert ended.code == 0, ended
    assert json.loads((run_dir("mpi") / "summary.json").read_text())["backend"] == "mpi"
    assert losses("mpi") == pytest.approx(losses("group"), rel=1e-5)


@pytest.mark.timeout(600)
def test_under_a_launcher_that_does_not_speak_to_mpi_gloo_is_used_and_that_is_said(
    sandbox: Sandbox, workdir: Path
) -> None:
    started = ("--launcher", "torchrun", "--ntasks-per-node", "2")  # an agent alone on its node hands its place on
    arguments = (*started, "-J", "gloo", "ddp", *LM, "--steps", "1", "--comm", "mpi")
    ended = hpcjobs("submit", *LAYOUT, *arguments, timeout_s=280)
    assert ended.code == 0, ended
    log = "".join(path.read_text(encoding="utf-8") for path in (run_dir("gloo") / "logs").iterdir())
    assert "--comm mpi: torchrun does not speak to Open MPI" in log
    assert "gradients travel by gloo" in log
