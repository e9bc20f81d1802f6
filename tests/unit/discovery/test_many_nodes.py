"""Clusters of very many nodes: only kinds of nodes are kept, and host lists stay ranges."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import yaml
from commandline import ok
from recorded import put_on_path
from scripted_slurm import answer

from hpcjobs.discovery.slurm_config import mean_nodes
from hpcjobs.slurm_commands import hosts_of

NODES = 100_000
PARTITION = "PartitionName={} AllowGroups=ALL State=UP TotalCPUs={} TotalNodes={} TRES=cpu={},mem={}M Nodes={}\n"


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of very many nodes, of which every tenth is drained."""
    folder = here / "slurm"
    folder.mkdir()
    put_on_path(folder, "bare")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    partition = PARTITION.format(
        "main", NODES * 8, NODES, NODES * 8, NODES * 1000, f"n[0-{NODES // 2},{NODES // 2 + 1}-{NODES - 1}]"
    )
    filler = "OS=Linux 6.1 #1 SMP " + "x" * 300
    nodes = (
        f'seq 0 {NODES - 1} | awk \'{{print "NodeName=n" $1 " CPUTot=8 CPULoad=0." $1 " Gres=(null) {filler} '
        'RealMemory=1000 State=" ($1 % 10 ? "IDLE" : "IDLE+DRAIN") " Partitions=main BootTime=" $1 '
        '($1 % 10 ? "" : " Reason=bad disk [root@1763000000]")}\''
    )
    answer(
        folder,
        "scontrol",
        "case \"$*\" in *config*) printf 'ClusterName = big\\nSelectType = select/cons_tres\\n' ;; "
        f"*partition*) echo '{partition.strip()}' ;; *node*) {nodes} ;; *) exit 1 ;; esac",
    )
    return folder


def test_a_cluster_of_very_many_nodes_is_described_without_holding_what_slurm_prints(cluster: Path, here: Path) -> None:
    tracemalloc.start()
    try:
        ok("sites", "init", "big", "--file", "big.yaml")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6, f"{peak / 1e6:.0f} MB; the answer has {NODES * 450 / 1e6:.0f} MB"
    (partition,) = yaml.safe_load((here / "big.yaml").read_text())["partitions"].values()
    assert partition["nodes"] == NODES
    assert "100000 nodes" in (here / "big.yaml").read_text()
    findings = ok("sites", "check", "./big.yaml").out
    assert "10000 of 100000 nodes start no job: n0 IDLE+DRAIN (bad disk [root@2025-11-13T" in findings
    assert "; and 9997 more" in findings


def random_list(source: random.Random) -> str:
    """A host list as Slurm prints them, of names that other lists may have too."""
    parts = []
    for _ in range(source.randint(1, 4)):
        first = source.randint(0, 120)
        last = first + source.randint(0, 30)
        parts.append(
            source.choice(
                [
                    *(f"n[{first}-{last}]", f"n{first}", f"n[{first:03d}-{last:03d}]", f"n{first:03d}", "login"),
                    *(f"n[{first}-{last}]-ib", f"n{first}-ib", f"n[{first}-{last}]x5", f"n{first}x5", f"r1n{first}"),
                    f"r[1-2]n[{first}-{last},{last + 3}]",
                ]
            )
        )
    return ",".join(parts)


def test_hidden_nodes_of_partitions_that_overlap_are_those_of_the_expanded_lists() -> None:
    source = random.Random(7)
    for _ in range(300):
        lists = {f"p{number}": random_list(source) for number in range(source.randint(1, 4))}
        sizes = {name: len({*hosts_of(text)}) for name, text in lists.items()}
        out = "".join(PARTITION.format(p, n * 8, n, n * 8, n * 100, lists[p]) for p, n in sizes.items())
        expected = Counter(
            frozenset(p for p in lists if host in hosts_of(lists[p]))
            for host in {h for p in lists for h in hosts_of(lists[p])}
        )
        nodes = mean_nodes(out)
        assert {node.partitions: node.size for node in nodes} == expected, lists
        for node in nodes:
            assert all(name in hosts_of(lists[p]) for name in node.names for p in node.partitions)
            assert len(node.names) == min(3, node.size)
