"""A real Apptainer, and an image of three seconds: mount points through which this machine's programs are seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import hpcjobs
from imagefile import THIN

from hpcjobs.containers.look import program_here
from hpcjobs.processes.programs import run
from hpcjobs.sandbox import Sandbox
from hpcjobs.site.library import load_site

SEEN = ("/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache")


@pytest.fixture(scope="session")
def apptainer() -> str:
    """The program; skipped where there is none."""
    program = program_here(load_site("local"))
    if not Path(program).is_absolute():
        pytest.skip("Apptainer is not installed (containers/install_apptainer.sh)")
    assert run([program, "--version"]).code == 0
    return program


@pytest.fixture
def site_file(apptainer: str, sandbox: Sandbox, workdir: Path) -> Callable[..., str]:
    """Writes a site file for the sandbox's cluster with images of its own; its path."""

    def written(**options: object) -> str:
        binds = [path for path in SEEN if Path(path).exists()]
        section = {"runtime": "apptainer", "program": apptainer, "folder": str(workdir / "images"), "binds": binds}
        site = {"partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}}, "mpi": "pmix", "interface": "eth0"}
        site |= {"defaults": {"time": "10m"}, "slurm_conf": sandbox.slurm_conf, "node_local": ["/tmp"]}
        of_site = {name: options.pop(name) for name in tuple(options) if name in ("mpi", "scheduler", "slurm_conf")}
        path = workdir / "images.yaml"
        path.write_text(json.dumps({**site, **of_site, "containers": section | options}), encoding="utf-8")
        return str(path)

    return written


@pytest.fixture
def thin(site_file: Callable[..., str]) -> str:
    """A site whose image `thin` has been built, with the Python and the packages of the tests."""
    path = site_file(python=sys.executable, binds=[*SEEN, sys.base_prefix, sys.prefix])
    built = hpcjobs("container", "build", str(THIN), "--site", path)
    assert built.code == 0, built
    return path
