"""The sample cluster for every test that wants it, in a folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_cluster import RECORDED_FOLDER, SampleCluster, Saved, sample_cluster, use


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SampleCluster, Saved]]:
    # A random name as long as the recorded one: paths are part of tables, whose width they decide.
    folder = Path(tempfile.mkdtemp(prefix=RECORDED_FOLDER[: -len("12345678")], dir="/"))
    try:
        cluster = sample_cluster(folder)
        yield cluster, cluster.save(tmp_path_factory.mktemp("saved") / "first")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cluster(sample: tuple[SampleCluster, Saved], monkeypatch: pytest.MonkeyPatch) -> SampleCluster:
    cluster, saved = sample
    cluster.restore(saved)
    use(cluster, monkeypatch)
    return cluster
