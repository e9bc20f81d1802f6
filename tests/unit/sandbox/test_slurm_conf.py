"""Another cluster's slurm.conf as a site, on shapes of ten public clusters and deployment projects."""

from __future__ import annotations

from pathlib import Path

import pytest
from partition_facts import facts

from hpcjobs.errors import ConfigError
from hpcjobs.sandbox.layout import Shape, read_slurm_conf, resolve_layout
from hpcjobs.site.library import load_site
from hpcjobs.site.models import NodeShape
from hpcjobs.units import time_limit_s

CLUSTERS = Path(__file__).parents[2] / "data" / "clusters"
NAMES = sorted(path.stem for path in CLUSTERS.glob("*.conf"))


@pytest.mark.parametrize("name", NAMES)
def test_partitions_nodes_and_limits_are_those_that_the_site_file_of_the_cluster_has(name: str) -> None:
    from_conf = read_slurm_conf(CLUSTERS / f"{name}.conf").site.partitions
    from_file = load_site(str(CLUSTERS / f"{name}.yaml")).partitions
    assert {key: facts(each) for key, each in from_conf.items()} == {
        key: facts(each) for key, each in from_file.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_large_cluster_becomes_a_few_hosts_with_one_of_each_kind(name: str) -> None:
    site = read_slurm_conf(CLUSTERS / f"{name}.conf").site
    layout = resolve_layout(Shape(like=f"{name}.conf"), site)
    kinds = {group.shape for partition in site.partitions.values() for group in partition.groups}
    assert len(layout.hosts) == max(4, len(kinds))
    assert all(layout.members[partition] for partition in site.partitions)


def conf(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ours.conf"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_continued_lines_included_files_and_sets_of_nodes_are_read(tmp_path: Path) -> None:
    (tmp_path / "nodes.conf").write_text(
        "NodeName=DEFAULT Sockets=2 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=64000 MemSpecLimit=2000\n"
        "NodeName=n[1-3] Feature=thin\n"
        'NodeName=g1 CPUs=20 Gres="gpu:a100:4,nvme:1" Features=gpu\n'
        "NodeName=later[1-9] State=FUTURE\n"
    )
    path = conf(
        tmp_path,
        "JobRequeue=0 # as our users like it\n"
        "include nodes.conf\n"
        "NodeSet=withgpu Feature=gpu\n"
        "PartitionName=DEFAULT MaxTime=120 State=UP\n"
        "PartitionName=all Nodes=ALL \\\n  Default=yes MaxNodes=INFINITE\n"
        "partitionname=gpu nodes=withgpu maxtime=1-0\n"
        "PartitionName=empty Nodes=\n",
    )
    cluster = read_slurm_conf(path)
    partitions = cluster.site.partitions
    thin = NodeShape(cpus=32, mem=62000, features=("thin",))
    gpu = NodeShape(cpus=20, mem=62000, gpus=4, gpu_model="a100", features=("gpu",))
    assert [(group.shape, group.count) for group in partitions["all"].groups] == [(thin, 3), (gpu, 1)]
    assert [group.shape for group in partitions["gpu"].groups] == [gpu]
    assert (partitions["all"].default, partitions["all"].max_nodes) == (True, None)
    assert {name: time_limit_s(each.max_time) for name, each in partitions.items()} == {"all": 7200, "gpu": 86400}
    assert cluster.settings == {"JobRequeue": "0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no partition with nodes"),
        ("\nNodeName=n1 CPUs=many", r"ours.conf:2: cpus=many is no number"),
        ("NodeName=n[1-x] CPUs=1", r"ours.conf:1: '1-x' in a host list is no number and no range"),
        ("NodeName=n1\nPartitionName=p Nodes=n1 MaxTime=soon", r"ours.conf:2: partition p: max_time"),
        ("include other.conf", "other.conf: No such file"),
    ],
)
def test_a_file_that_describes_no_cluster_is_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_slurm_conf(conf(tmp_path, text))


@pytest.mark.parametrize(
    ("gres", "gpus", "model", "models"),
    [
        ("gpu:a100:2,gpu:v100:1", 3, None, ("a100:2", "v100:1")),
        ("gpu:a100:2(S:0),gpu:1g.5gb:14(S:1),mps:400", 16, None, ("a100:2", "1g.5gb:14")),
        ("gpu:a100:2,gpu:a100:2", 4, "a100", ()),
        ("gpu:3090:4", 4, "3090", ()),
        ("gpu:a100-sxm4:no_consume:4", 4, "a100-sxm4", ()),
        ("GPU:H100:8", 8, "H100", ()),
        ("gpu:2,gpu:v100:1", 3, None, ()),
    ],
)
def test_gpus_of_every_type_of_a_node_are_read(
    gres: str, gpus: int, model: str | None, models: tuple[str, ...], tmp_path: Path
) -> None:
    path = conf(tmp_path, f"NodeName=g1 CPUs=20 Gres={gres}\nPartitionName=p Nodes=g1\n")
    shape = read_slurm_conf(path).site.partitions["p"].shape
    assert (shape.gpus, shape.gpu_model, shape.gpu_models) == (gpus, model, models)


def test_a_partition_in_which_no_job_may_run_is_left_out(tmp_path: Path) -> None:
    path = conf(tmp_path, "NodeName=n1\nPartitionName=off Nodes=n1 MaxNodes=0\nPartitionName=on Nodes=n1 MaxNodes=1\n")
    assert list(read_slurm_conf(path).site.partitions) == ["on"]
