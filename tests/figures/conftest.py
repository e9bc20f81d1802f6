"""Each test of a figure has a folder, a home and a scripted cluster of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted_cluster import SITE, ScriptedCluster

from hpcjobs.site import machine
from hpcjobs.site.machine import cluster_name

_FOREIGN = ("HPCJOBS_", "SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "XDG_")


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    """The site ``mine``, whose Slurm is scripted; nothing of the user's own."""
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    here, home = tmp_path / "here", tmp_path / "home"
    (here / "site_configs").mkdir(parents=True)
    home.mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE, encoding="utf-8")
    commands = ScriptedCluster(tmp_path / "slurm")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(tmp_path / "no-sandbox"))
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(here)
    cluster_name.cache_clear()  # another test's cluster
    machine._has_configuration.cache_clear()
    return commands
