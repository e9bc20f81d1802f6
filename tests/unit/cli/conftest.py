"""The sample cluster for every test that wants it, always in the same folder."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_cluster import SampleCluster, Saved, sample_cluster, use

PLACE = Path("/tmp/hpcjobs_golden")
"""Always the same: its name is part of tables, whose width it decides."""


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SampleCluster, Saved]]:
    with Path("/tmp/hpcjobs_golden.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(PLACE, ignore_errors=True)
        PLACE.mkdir()
        try:
            cluster = sample_cluster(PLACE)
            yield cluster, cluster.save(tmp_path_factory.mktemp("saved") / "first")
        finally:
            shutil.rmtree(PLACE, ignore_errors=True)


@pytest.fixture
def cluster(sample: tuple[SampleCluster, Saved], monkeypatch: pytest.MonkeyPatch) -> SampleCluster:
    cluster, saved = sample
    cluster.restore(saved)
    use(cluster, monkeypatch)
    return cluster
