"""A working folder with files of modules' names, which anybody may have put there: none of them runs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from commandline import ok

import hpcjobs
from hpcjobs.fabric.check import HostGroup
from hpcjobs.job.fault_tolerance import preflight_words
from hpcjobs.site.library import load_site

NAMES = ("torch", "json", "dataclasses", "logging", "importlib", "runpy", "argparse", "sitecustomize", "queue")
WORKLOAD = """\
import torch
from hpcjobs.trainers.workloads.base import Workload


class Points:
    def __len__(self):
        return 8

    def read_batch(self, indices):
        return torch.ones(len(indices), 2)


def make(config):
    return Workload(
        name="points", unit="points", units_per_sample=1, flops_per_sample=1.0, train=Points(), held_out=None,
        batch_size=4, lr=0.1, build_model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch).sum(),
    )
"""


@pytest.fixture
def marker(here: Path) -> Path:
    """The file that a foreign module would write."""
    marker = here.parent / "was-run"
    text = f"open({str(marker)!r}, 'a').write(__file__ + '\\n')\nraise SystemExit(__file__)\n"
    for name in NAMES:
        (here / f"{name}.py").write_text(text)
    for name in ("hpcjobs", "horovod"):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text(text)
    return marker


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_a_trainer_runs_the_users_own_workload_of_the_folder_and_no_foreign_module(
    launcher: str, here: Path, marker: Path
) -> None:
    (here / "mailbox.py").write_text(WORKLOAD)  # also where Python has one of the name
    program = ("ddp", "--workload", "mailbox:make", "--steps", "1", "--no-probe", "--device", "cpu")
    ok("submit", "--site", "local", "--launcher", launcher, "--wait", *program)
    assert not marker.exists(), marker.read_text()


def test_a_check_of_nodes_runs_no_foreign_module(here: Path, marker: Path) -> None:
    site = load_site("local")
    python = hpcjobs.plan("true", site="local").job.python
    place = HostGroup(("localhost",), srun=False, mpi=None, cpus_per_task=None, interface=None, suffix="")
    commands = [
        preflight_words(site, python=python, cpus_per_task=1, nodes=None, launcher="srun"),
        hpcjobs.plan(("hpcjobs.fabric.check", "--quick"), site="local").job.argv,
        place.module(("localhost",), "hpcjobs.fabric.agent", mpi=None),
    ]
    for command in commands:
        done = subprocess.run([*command, "--help"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), shlex.join(command)
        assert "usage" in done.stdout
    assert not marker.exists(), marker.read_text()
