"""The submit side against a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import hpcjobs
from login_node import SITE, Cluster
from shared import shared_folder

from hpcjobs.sandbox import Sandbox
from hpcjobs.site.machine import current_sandbox


@pytest.fixture(scope="session")
def overtime(sandbox: Sandbox) -> Iterator[tuple[Path, str]]:
    """Home and id of a job that runs into its limit, a minute at least, while the other tests run."""
    submit = ("submit", "--site", SITE, "--json", "-t", "1m", "--ntasks-per-node", "2", "sleep", "600")
    with shared_folder() as home:
        answer = hpcjobs(*submit, cwd=home, env={"HOME": str(home)})
        assert answer.code == 0, answer
        yield home, answer.json["job_id"]


@pytest.fixture
def cluster(sandbox: Sandbox, overtime: tuple[Path, str], workdir: Path) -> Iterator[Cluster]:
    """A login node, in a fresh folder that every host sees."""
    record = current_sandbox()
    assert record is not None
    node = Cluster(workdir, record)
    yield node
    if node.submitted:
        node.slurm("scancel", "--quiet", *node.submitted)
