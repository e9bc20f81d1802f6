"""Every unit test has a home, a working folder and an environment of its own, and sees no cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcjobs.run import listing
from hpcjobs.site import machine
from hpcjobs.site.machine import cluster_name

_FOREIGN = (
    *("HPCJOBS_", "SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "XDG_"),
    *("BASH_FUNC_", "BASH_ENV", "MODULE", "__MODULES_", "LOADEDMODULES", "LMOD_"),  # of a login shell with modules
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder beside an empty home; no setting of the user's, no sandbox that is up."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(tmp_path / "no-sandbox"))
    monkeypatch.chdir(here)
    cluster_name.cache_clear()  # another test's cluster
    machine._has_configuration.cache_clear()
    listing._file_of_slurm.cache_clear()
    return here
