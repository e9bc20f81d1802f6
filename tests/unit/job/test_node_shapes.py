"""Partitions of several node shapes: refused is what no node can run, and more nodes than can run it; nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcjobs
from hpcjobs.errors import HpcJobsWarning, RequestError
from hpcjobs.job.models import Job

SITE = """
partitions:
  gpu:
    default: true
    nodes:
      - {count: 10, cpus: 40, mem: 380G, gpus: 4, gpu_model: v100, features: [v100, ib]}
      - {count: 2, cpus: 128, mem: 1T, gpus: 8, gpu_model: a100, features: [a100]}
    max_nodes: 6
  cpu:
    nodes:
      - {count: 20, cpus: 28, mem: 120000}
      - {count: 1, cpus: 48, mem: 1500G}
    qos: [normal]
  wide:
    nodes: 20
    node: {cpus: 28, mem: 120G}
    min_nodes: 4
    qos: [big]
  small:
    nodes: 4
    node: {cpus: 28, mem: 120G}
    max_mem_per_node: 60G
    max_cpus_per_node: 14
  share:
    nodes: 4
    node: {cpus: 28, mem: 120G}
    max_mem_per_cpu: 4G
    accounts: [physics, chemistry]
qos: {normal: 3-00:00:00, big: UNLIMITED}
default_qos: normal
"""


def job(**request: object) -> Job:
    Path("site.yaml").write_text(SITE)
    return hpcjobs.plan(["true"], site="./site.yaml", **request).job  # type: ignore[arg-type]


def refusal(**request: object) -> str:
    with pytest.raises(RequestError) as caught:
        job(**request)
    return str(caught.value)


@pytest.mark.parametrize(
    "request_",
    [
        {"gpus_per_node": 8},
        {"gpus_per_node": "a100:8", "nodes": 2},
        {"mem": "1T"},
        {"ntasks_per_node": 128},
        {"constraint": "v100&ib", "nodes": 6},
        {"constraint": "v100|a100", "gpus_per_node": 5},
        {"constraint": "[v100|a100]"},
        {"constraint": "a100*2"},
        {"partition": "cpu", "nodes": 21},
        {"partition": "cpu", "mem": "1500G"},
        {"partition": "wide", "qos": "big", "nodes": 4, "time": "UNLIMITED"},
        {"partition": "small", "mem": "60G", "ntasks_per_node": 14},
        {"partition": "share", "account": "physics", "mem": "112G"},
        {"partition": "share", "mem_per_cpu": "8G", "ntasks_per_node": 14},
        {"partition": "cpu,gpu", "mem": "1400G"},
        {"partition": "gpu,cpu", "gpus_per_node": 4},
        {"nodes": "6-12"},
        {"partition": "wide", "qos": "big", "nodes": "2-4"},
    ],
    ids=str,
)
def test_what_enough_nodes_can_run_is_accepted(request_: dict[str, object]) -> None:
    job(**request_)


@pytest.mark.parametrize(
    ("request_", "arguments"),
    [
        ({"gpus_per_node": 9}, "gpus_per_node=9 (flag): a node of partition gpu has 4 or 8"),
        ({"gpus_per_node": "v100:5"}, "gpus_per_node=v100:5 (flag): a node of partition gpu has 4 or 8 x a100"),
        ({"gpus_per_node": "t4:1"}, "gpus_per_node=t4:1 (flag): a node of partition gpu has 4 x v100 or 8 x a100"),
        ({"gpus_per_node": "a100:2", "nodes": 3}, "nodes=3 (flag): partition gpu has 2 nodes with what each node"),
        ({"mem": "500G", "nodes": 3}, "partition gpu has 2 nodes with what each node of the job needs"),
        (
            {"constraint": "v100", "gpus_per_node": 8},
            "has all of this (its nodes: 10 x (40 CPUs, 380G, 4 GPUs v100, v1",
        ),
        ({"constraint": "v100&a100"}, "constraint=v100&a100 (flag): a node of partition gpu has v100,ib or a100"),
        ({"ntasks_per_node": 129}, "= 129 CPUs: a node of partition gpu has 40 or 128"),
        ({"nodes": 7}, "nodes=7 (flag): partition gpu allows 6"),
        ({"nodes": "7-9"}, "nodes=7-9 (flag): partition gpu allows 6"),
        ({"partition": "cpu", "nodes": 2, "mem": "121G"}, "partition cpu has 1 nodes with what each node"),
        ({"partition": "wide", "qos": "big", "nodes": 3}, "nodes=3 (flag): partition wide needs at least 4"),
        (
            {"partition": "wide", "nodes": 4},
            "qos: none is named, and the default is normal: partition wide accepts big",
        ),
        ({"partition": "small", "mem": "61G"}, "mem=61G (flag): partition small allows 60G per node"),
        ({"partition": "small", "mem": "0"}, "mem=0 (flag): partition small allows 60G per node"),
        ({"partition": "small", "ntasks_per_node": 15}, "15 CPUs: a node of partition small has 14 for jobs of it"),
        (
            {"partition": "small", "exclusive": True},
            "exclusive=True (flag): a node of partition small has 14 of 28 CPUs",
        ),
        ({"partition": "share", "mem": "113G"}, "mem=113G (flag) = 29 CPUs at 4G per CPU: a node of partition share"),
        ({"partition": "share", "mem": "0"}, "= 30 CPUs at 4G per CPU"),
        ({"partition": "share", "mem_per_cpu": "4097M", "ntasks_per_node": 15}, "= 30 CPUs at 4G per CPU"),
        ({"partition": "share", "account": "law"}, "account=law (flag): partition share accepts physics, chemistry"),
        ({"time": "UNLIMITED"}, "time=UNLIMITED (flag): qos normal allows 3-00:00:00"),
        ({"gpus_per_node": 4, "mem_per_gpu": "300G"}, "mem_per_gpu=300G (flag) x 4 GPUs: a node of partition gpu has"),
        ({"partition": "cpu,gpu", "mem": "1600G"}, "mem=1600G (flag): a node of partition cpu has 120000M or 1500G"),
        ({"partition": "cpu,gpi"}, "partition 'gpi' (flag) is not one of site site"),
    ],
    ids=str,
)
def test_what_no_node_or_too_few_can_run_is_refused(request_: dict[str, object], arguments: str) -> None:
    assert arguments in refusal(**request_)


def test_a_model_is_chosen_per_submission_and_each_gpu_keeps_its_task() -> None:
    chosen = job(gpus_per_node="v100:4")
    assert (chosen.gpus_per_node, chosen.gpu_model, chosen.ntasks_per_node) == (4, "v100", 4)
    assert "#SBATCH --gpus-per-node=v100:4" in hpcjobs.plan(["true"], site="./site.yaml", gpus_per_node="v100:4").script
    anything = job(gpus_per_node=2)
    assert (anything.gpu_model, anything.ntasks_per_node) == (None, 2)


def test_gpus_asked_for_by_gres_are_the_same_gpus() -> None:
    """One task per GPU, and the container's --nv, depend on it."""
    chosen = job(gres="gpu:v100:2,nvme:100")
    assert (chosen.gpus_per_node, chosen.gpu_model, chosen.ntasks_per_node) == (2, "v100", 2)
    assert chosen.resources.gres == "nvme:100"
    assert "GPUs are requested twice" in refusal(gres="gpu:2", gpus_per_node=2)


def test_a_range_of_nodes_reaches_slurm_and_the_world_is_what_slurm_gives() -> None:
    plan = hpcjobs.plan(["true"], site=_site(), nodes="2-4", ntasks_per_node=2)
    assert "#SBATCH --nodes=2-4" in plan.script
    assert " HPCJOBS_NNODES=$SLURM_JOB_NUM_NODES " in plan.script
    assert (plan.job.nodes, plan.job.max_nodes, plan.job.ntasks) == (2, 4, 8)
    assert "not from a range" in refusal(nodes="2-4", spare=1)


def test_several_partitions_and_no_time_limit_reach_slurm() -> None:
    plan = hpcjobs.plan(["true"], site=_site(), partition="gpu,wide", nodes=4, qos="big", time="infinite")
    assert "#SBATCH --partition=gpu,wide" in plan.script
    assert "#SBATCH --time=UNLIMITED" in plan.script


def test_memory_as_sinfo_prints_it_reaches_slurm_with_its_unit() -> None:
    assert "#SBATCH --mem=120000M" in hpcjobs.plan(["true"], site=_site(), partition="cpu", mem="120000").script


def test_memory_without_a_unit_is_megabytes_in_flags_files_and_python(here: Path) -> None:
    (here / "job.yaml").write_text("{program: ['true'], resources: {partition: cpu, mem: 64}}")
    site = _site()
    with pytest.warns(HpcJobsWarning, match="64 megabytes"):
        plans = [
            hpcjobs.plan(["true"], site=site, partition="cpu", mem="64"),
            hpcjobs.plan(["true"], site=site, partition="cpu", mem=64),
            hpcjobs.plan(site=site, spec="job.yaml"),
        ]
    assert all("#SBATCH --mem=64M" in plan.script for plan in plans)


def _site() -> str:
    Path("site.yaml").write_text(SITE)
    return "./site.yaml"
