"""Two clusters with one home, and a controller that lost its state: ids repeat, and no job is taken for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from clusters_apart import ClusterApart, cluster_apart

COUNT = 100
SUBMIT = """
import sys
import hpcjobs
cluster, count, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for number in range(count):
    ends = number % 10 == 0
    program, hold = (["true"], None) if ends else (["sleep", "600"], number % 10 != 1 or None)
    print(hpcjobs.submit(hpcjobs.plan(program, site="shared", name=f"{cluster}-{number}", hold=hold)).id)
"""
LOSE_STATE = """
import os, shutil, signal, time
from hpcjobs import sandbox
from hpcjobs.sandbox.folder import alive, recorded_daemons
from hpcjobs.sandbox.folder import folder_at
folder = folder_at(None)
(controller,) = [daemon for daemon in recorded_daemons(folder) if daemon.name == "slurmctld"]
os.kill(controller.pid, signal.SIGKILL)
while alive(controller):
    time.sleep(0.05)
shutil.rmtree(folder.root / "ctld")
(folder.root / "ctld").mkdir()
found = sandbox.status().sandbox
assert found is not None
sandbox.up(found.shape)
"""


@pytest.fixture
def clusters(machine: None, workdir: Path) -> Iterator[tuple[ClusterApart, ClusterApart]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(cluster_apart(name, workdir)) for name in ("alpha", "beta"))  # type: ignore[misc]


@pytest.mark.long
def test_no_job_of_one_cluster_or_of_one_life_of_it_is_taken_for_another(
    clusters: tuple[ClusterApart, ClusterApart],
) -> None:
    ids: dict[str, list[str]] = {}

    def submit(cluster: ClusterApart) -> None:
        ids[cluster.name] = cluster.python(SUBMIT, cluster.name, str(COUNT)).split()

    threads = [threading.Thread(target=submit, args=(cluster,)) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alpha, beta = clusters
    assert ids["alpha"] == ids["beta"], "the same ids are what this is about"
    for cluster in clusters:
        listed = cluster.rows()
        assert len({row["run_dir"] for row in listed}) == len(listed) == 2 * COUNT
        for row in listed:
            owner, record = row["name"].split("-")[0], row["record"]
            if owner == cluster.name:
                assert not str(record["reason"]).startswith("on cluster"), row
            else:
                assert record["reason"] == f"on cluster {owner}" or record["state"] == "COMPLETED", row
        first = cluster.hpcjobs("wait", ids[cluster.name][0], "--json")
        assert (first.code, first.json[0]["name"]) == (0, f"{cluster.name}-0"), first
    everything = f"{ids['alpha'][0]}-{ids['alpha'][-1]}"
    before = beta.queue()
    assert alpha.hpcjobs("cancel", everything).code == 0
    assert alpha.hpcjobs("wait", everything).code != 0
    assert (alpha.queue(), beta.queue()) == ({}, before)
    theirs = next(row["run_dir"] for row in alpha.rows() if row["name"] == "beta-2")
    refused = alpha.hpcjobs("cancel", theirs)
    assert refused.code == 5
    assert "belongs to cluster beta, and this is cluster alpha" in refused.err

    alpha.python(LOSE_STATE)
    strangers = [alpha.run("sbatch", "--parsable", "--hold", "--job-name=other", "--wrap=sleep 9") for _ in range(20)]
    assert [answer.out.strip() for answer in strangers] == ids["alpha"][:20], "ids begin at 1 again"
    again = alpha.python(SUBMIT, "alpha", "20").split()
    assert again == ids["alpha"][20:40]
    first_lives = {row["name"]: row["run_dir"] for row in alpha.rows() if row["run_dir"] is not None}
    queue = alpha.queue()
    cancelled = alpha.hpcjobs("cancel", f"{ids['alpha'][0]}-{ids['alpha'][19]}")
    assert "cancelled" not in cancelled.out, cancelled
    assert {i: n for i, n in queue.items() if n == "other"}.items() <= alpha.queue().items()
    ended = alpha.hpcjobs("wait", ids["alpha"][10], "--json")
    assert (ended.code, ended.json[0]["name"], ended.json[0]["state"]) == (0, "alpha-10", "COMPLETED"), ended
    assert len([row for row in alpha.rows() if str(row["name"]).startswith("alpha-")]) == COUNT + 20
    old = next(e for e in first_lives.values() if "/alpha-21-" in e)
    assert "CANCELLED" in alpha.hpcjobs("show", old).out
    assert alpha.hpcjobs("cancel", again[2]).out == f"cancelled {again[2]}\n"
    assert beta.queue() == before
    remaining = alpha.queue()
    assert beta.hpcjobs("cancel", everything).code == 0
    assert beta.hpcjobs("wait", everything).code != 0
    assert (alpha.queue(), beta.queue()) == (remaining, {})
