"""Sandboxes that are like another cluster's slurm.conf, or like a system of the gallery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok
from nodeless import CLUSTERS

from hpcjobs import sandbox as sandboxes


@pytest.fixture(autouse=True)
def nothing_up(workdir: Path) -> Iterator[None]:
    yield
    sandboxes.down()


@pytest.mark.parametrize("name", ["sapienza", "owens"])
def test_what_sites_init_writes_on_a_sandbox_like_a_slurm_conf_runs_jobs_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one each partition needs a QOS, of the other some partitions take no job of one node."""
    up = ok("sandbox", "up", "--like", str(CLUSTERS / f"{name}.conf")).out
    assert 'next: eval "$(hpcjobs sandbox env)", then hpcjobs sites init' in up
    monkeypatch.setenv("SLURM_CONF", sandboxes.environment()["SLURM_CONF"])
    ok("sites", "init")
    partitions = ok("sites", "show", name, "--json").json["partitions"]
    assert len(partitions) == up.count("  partition ")
    for partition in partitions:
        assert ok("submit", "-p", partition, "--wait", "hostname").code == 0


@pytest.mark.parametrize(("name", "says"), [("lumi", "NCCL_NET_GDR_LEVEL=3"), ("perlmutter", "SLURM_JOB_QOS=regular")])
def test_a_job_runs_on_a_sandbox_like_a_system_of_the_gallery(name: str, says: str) -> None:
    """Two nodes, with the options, the QOS and the environment of the site."""
    ok("sandbox", "up", "--like", name, "--nodes", "4")
    arguments = ("-N", "2", "--ntasks-per-node", "2", "-c", "1", "env")
    job = ok("submit", "--site", name, "--wait", "--json", *arguments).json
    log = ok("logs", "--site", name, job["job_id"]).out
    assert {line.partition(":")[0] for line in log.splitlines() if line.endswith(f": {says}")} == {"0", "1", "2", "3"}
