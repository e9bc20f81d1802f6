"""A real Slurm for the tests that need one, and a fresh place for each of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shape import SHAPE
from shared import shared_folder

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.services import apt_line, is_debian, missing_packages


@pytest.fixture(scope="session")
def machine() -> None:
    """Skip where no sandbox can be."""
    if not is_debian():
        pytest.skip("a sandbox needs Debian or Ubuntu")
    if os.geteuid() != 0:
        pytest.skip("a sandbox needs root")
    if missing := missing_packages():
        pytest.skip(f"packages are missing: {apt_line(missing)}")


@pytest.fixture(scope="session")
def sandbox_is_ours(machine: None) -> bool:
    """Whether the tests brought the sandbox up; one that someone works with is used, and left up."""
    return sandboxes.status().state != "up"


@pytest.fixture(scope="session")
def sandbox(sandbox_is_ours: bool) -> Iterator[Sandbox]:
    """tu-hpc in four hosts, for the whole session."""
    try:
        yield sandboxes.up(SHAPE)
    finally:
        if sandbox_is_ours:
            sandboxes.down()


@pytest.fixture
def site_of_mpi(sandbox: Sandbox, workdir: Path) -> Callable[[str], str]:
    """Writes a site file for the sandbox's cluster that names another MPI type for srun; its path."""

    def written(mpi: str) -> str:
        partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
        site = {"partitions": partitions, "defaults": {"time": "10m"}, "mpi": mpi, "interface": "eth0"}
        path = workdir / "wrong.yaml"
        path.write_text(json.dumps({**site, "slurm_conf": sandbox.slurm_conf}), encoding="utf-8")
        return str(path)

    return written


@pytest.fixture
def workdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh folder that every host sees, as current folder and home, with nothing of the user's own."""
    for name in ("STATE", "CONFIG", "CACHE", "DATA"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "HPCJOBS_"))]:
        if name != "HPCJOBS_SANDBOX_ROOT":
            monkeypatch.delenv(name)
    with shared_folder() as folder:
        (folder / "home").mkdir()
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.chdir(folder)
        yield folder
