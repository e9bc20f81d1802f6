"""A laptop and a login node for the tests of sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from laptop import LOGIN, Laptop, laptop
from shared import shared_folder

from hpcjobs.jupyter import session
from hpcjobs.sandbox import Sandbox

Site = Callable[..., str]


@pytest.fixture(scope="session")
def desk(sandbox: Sandbox) -> Iterator[Laptop]:
    """The laptop, for all tests: it and the login node keep nothing of a session."""
    for program in ("/usr/sbin/sshd", "/usr/bin/chromium"):
        if not Path(program).exists():
            pytest.skip(f"no {program}: make test installs it as root")
    with shared_folder() as folder, laptop(folder) as result:
        yield result


@pytest.fixture
def site(sandbox: Sandbox, workdir: Path) -> Iterator[Site]:
    """Writes a site file of the sandbox's cluster with this ``jupyter`` section; its path. Ends what was started."""

    def written(**jupyter: object) -> str:
        path = workdir / "here.yaml"
        fields = {
            "partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}},
            "defaults": {"time": "15m", "mem": "1G"},
            "slurm_conf": sandbox.slurm_conf,
            "login": f"root@{LOGIN}",
            "node_local": ["/tmp"],
            "jupyter": jupyter,
        }
        path.write_text(json.dumps(fields), encoding="utf-8")
        return str(path)

    yield written
    session.stop([result.entry for result in session.sessions()])
