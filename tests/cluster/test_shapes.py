"""Shapes of other clusters on a real Slurm: ten public slurm.conf files, and the systems of the gallery."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ok, within
from nodeless import CLUSTERS, like_site, nodeless
from partition_facts import facts

from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.layout import Shape, resolve_layout
from hpcjobs.site.library import load_site
from hpcjobs.site.search import gallery_folder

HERE = Path(__file__).resolve().parent
ELSEWHERE = HERE.parents[1] / "tools" / "elsewhere"
CONFS = sorted(path.stem for path in CLUSTERS.glob("*.conf"))
SHORT = ("biomedia", "magic-castle", "sapienza")
"""Of the ten, those that every run tries; tests/unit/sandbox reads all of them."""
GALLERY = sorted(path.stem for path in gallery_folder().glob("*.yaml"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in CONFS])
def test_the_file_that_sites_init_writes_describes_the_cluster_and_takes_a_job_in_each_partition(
    sandbox: Sandbox, workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cluster's full size: its nodes are cloud nodes that no job starts."""
    site = load_site(str(CLUSTERS / f"{name}.yaml"))
    home = workdir / "ctld"
    home.mkdir()
    with nodeless(sandbox, name, site, home) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        ok("sites", "init", "ours")
        described = load_site("ours").partitions
        assert {key: facts(each) for key, each in described.items()} == {
            key: facts(each) for key, each in site.partitions.items()
        }
        for partition in described:
            arguments = ("submit", "--site", "ours", "-p", partition, "--test-only", "hostname")
            answer = within(*arguments)
            assert answer.code == 0, (arguments, answer)


@pytest.mark.parametrize("name", GALLERY)
def test_slurm_accepts_the_files_of_a_sandbox_that_is_like_a_system_of_the_gallery(
    sandbox: Sandbox, workdir: Path, name: str
) -> None:
    layout = resolve_layout(Shape(like=name), load_site(name))
    home = workdir / "ctld"
    home.mkdir()
    with like_site(sandbox, name, home) as cluster:
        shown = cluster.run("sinfo", "--noheader", "--all", "--Node", "--format=%R %N %c %G").stdout.split("\n")
    built = {
        f"{partition} {host.name} {host.shape.cpus} "
        + (f"gpu:{host.shape.gpu_model + ':' if host.shape.gpu_model else ''}{host.shape.gpus}" * bool(host.shape.gpus))
        for partition, members in layout.members.items()
        for host in layout.hosts
        if host.name in members
    }
    assert {line.strip().replace("(null)", "").strip() for line in shown if line} == {line.strip() for line in built}


def test_a_sandbox_like_a_slurm_conf_or_a_system_of_the_gallery_runs_jobs(machine: None) -> None:
    """The tests of unlike/shapes.py, which bring up sandboxes of their own."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "unlike" / "shapes.py")]
    done = subprocess.run(
        [str(ELSEWHERE), "shapes", *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
