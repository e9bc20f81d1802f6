"""The submit side against a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from login_node import Cluster

from hpcjobs.sandbox import Sandbox
from hpcjobs.site.rehearsal import current


@pytest.fixture
def cluster(sandbox: Sandbox, workdir: Path) -> Iterator[Cluster]:
    """A login node, in a fresh folder that every host sees."""
    record = current()
    assert record is not None
    node = Cluster(workdir, record)
    yield node
    if node.submitted:
        node.slurm("scancel", "--quiet", *node.submitted)
