"""What hpcjobs says of a request is what Slurm says of it, on clusters of many kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from nodeless import ACCOUNT, CLUSTERS, Nodeless, nodeless

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.job.options import sbatch_options
from hpcjobs.sandbox import Sandbox
from hpcjobs.scheduler.slurm.client import hint_for
from hpcjobs.site.models import Partition, Site
from hpcjobs.units import memory_bytes, slurm_time, time_limit_s

SHORT = ("odd", "sapienza")
NAMES = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
REQUESTS = 60
Request = dict[str, object]


class Verdict(NamedTuple):
    """Of one request: refused by hpcjobs and by Slurm, and in which words (None: accepted)."""

    request: Request
    ours: str | None
    slurms: str | None


def site_of(name: str) -> Site:
    return hpcjobs.load_site(str(CLUSTERS / f"{name}.yaml"))


def requests(site: Site, seed: str) -> Iterator[Request]:
    """Requests around every limit of the site's file, half of them within it."""
    chance = random.Random(seed)
    while True:
        name = chance.choice(list(site.partitions))
        request: Request = {"partition": name}
        for field, values in choices(site, site.partitions[name], chance).items():
            if values and chance.random() < 0.45:
                request[field] = chance.choice(values)
        if site.partitions[name].qos and "qos" not in request and chance.random() < 0.7:
            request["qos"] = chance.choice(site.partitions[name].qos or ())
        if site.partitions[name].accounts and "account" not in request:
            request["account"] = chance.choice(site.partitions[name].accounts or ())
        yield request


def choices(site: Site, partition: Partition, chance: random.Random) -> dict[str, list[object]]:
    """Values on either side of the partition's limits, and of those of one of its kinds of node."""
    group = chance.choice(partition.groups)
    most = min(partition.max_nodes or partition.node_count, partition.node_count)
    least = partition.min_nodes or 1
    nodes: list[object] = [1, 2, least, group.count, most, most + 1, f"{least}-{most}"]
    # A range that reaches beyond MinNodes or MaxNodes is refused where EnforcePartLimits is set, and else cut: Slurm's
    # own affair.
    memory: list[object] = []
    if group.mem_bytes is not None:
        node = group.mem_bytes >> 20
        memory = ["0", f"{node}M", f"{node + 1}M", f"{node // 2}M", "1G"]
        if partition.max_mem_per_node is not None:
            limit = memory_bytes(str(partition.max_mem_per_node)) >> 20
            memory += [f"{limit}M", f"{limit + 1}M"]
        if partition.max_mem_per_cpu is not None:
            limit = memory_bytes(str(partition.max_mem_per_cpu)) >> 20
            memory += [f"{limit * group.cpus}M", f"{limit * group.cpus + 1}M", f"{limit * 3}M"]
    per_cpu = [f"{max(1, (group.mem_bytes or 1 << 30) // group.cpus >> 20)}M", "100M"] if memory else []
    if memory and partition.max_mem_per_cpu is not None:
        per_cpu.append(f"{(memory_bytes(str(partition.max_mem_per_cpu)) >> 20) * 2}M")
    cpus = partition.max_cpus_per_node or group.cpus
    layout = chance.random() < 0.5
    models = [f"{each.gpu_model}:{count}" for each in partition.groups if each.gpus for count in (1, each.gpus)]
    longest = time_limit_s(partition.max_time)
    limits = [longest or 86400, *(time_limit_s(limit or None) or 0 for limit in site.qos.values())]
    times: list[object] = ["01:00:00", *(slurm_time(limit + more) for limit in limits for more in (0, 60) if limit)]
    which = chance.random() < 0.7
    return {
        "nodes": [value for value in nodes if value],
        "ntasks_per_node": [1, 2, cpus, cpus + 1, group.cpus] if layout else [],
        "cpus_per_task": [] if layout else [1, 4, cpus, cpus + 1, group.cpus],
        "mem": memory if which else [],
        "mem_per_cpu": [] if which else per_cpu,
        "gpus_per_node": [1, group.gpus, group.gpus + 1, *models, *models] if models else [1] if which else [],
        "time": [*times, "UNLIMITED"],
        "qos": [*sorted(site.known_qos), "nosuch"] if site.qos and chance.random() < 0.4 else [],
        "account": [ACCOUNT] if chance.random() < 0.2 else [],
        "constraint": [
            *(feature for each in partition.groups for feature in each.features or ()),
            *("|".join(each.features) for each in partition.groups if each.features),
            *("&".join(each.features) for each in partition.groups if each.features),
        ],
        "exclusive": [True] if chance.random() < 0.3 else [],
    }


def plain_options(request: Request) -> list[str]:
    """The request as a user would type it for sbatch, one task per GPU."""
    options = [
        f"--{field.replace('_', '-')}" + ("" if value is True else f"={value}") for field, value in request.items()
    ]
    gpus = int(str(request.get("gpus_per_node") or 0).rpartition(":")[2])
    if "ntasks_per_node" not in request:
        options.append(f"--ntasks-per-node={gpus or 1}")
    return options if "nodes" in request else [*options, "--nodes=1"]


def verdict(cluster: Nodeless, site: Site, request: Request) -> tuple[Verdict, list[str]]:
    """Both verdicts, and what an accepted job lacks."""
    ours: str | None = None
    options = plain_options(request)
    try:
        job: Job | None = hpcjobs.plan(["true"], site=site, **request).job  # type: ignore[arg-type]
    except RequestError as error:
        ours, job = error.message, None
    if job is not None:
        options = [f"--{name}" + ("" if value is None else f"={value}") for name, value in sbatch_options(job)]
    job_id, answer = cluster.submit(options)
    if job_id is None:
        return Verdict(request, ours, answer), []
    shown = cluster.job(job_id)
    cluster.run("scancel", job_id)
    return Verdict(request, ours, None), list(missing(job, shown)) if job is not None else []


def missing(job: Job, shown: dict[str, str]) -> Iterator[str]:
    """What was asked for and is not part of the job that Slurm has."""
    request = job.resources
    expected: dict[str, object] = {"Partition": request.partition}
    if request.time:
        expected["TimeLimit"] = request.time
    if request.qos:
        expected["QOS"] = request.qos
    if request.account:
        expected["Account"] = request.account
    if request.constraint:
        expected["Features"] = request.constraint
    if job.gpus_per_node:
        model = f"{job.gpu_model}:" if job.gpu_model else ""
        expected["TresPerNode"] = f"gres:gpu:{model}{job.gpus_per_node}"
    for name, value in expected.items():
        if str(shown.get(name)).replace("gres/gpu:", "gres:gpu:") != str(value):  # newer Slurm: gres/gpu
            yield f"{name} is {shown.get(name)}, not {value}"
    if int(shown["NumNodes"].split("-")[0]) < job.nodes:
        yield f"NumNodes is {shown['NumNodes']}"
    if int(shown["NumCPUs"].split("-")[0]) < job.nodes * job.ntasks_per_node * (request.cpus_per_task or 1):
        yield f"NumCPUs is {shown['NumCPUs']}"
    if (
        request.mem
        and request.mem != "0"
        and memory_bytes(shown.get("MinMemoryNode", "0")) < memory_bytes(str(request.mem))
    ):
        yield f"MinMemoryNode is {shown.get('MinMemoryNode')}, not {request.mem}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in NAMES])
def test_hpcjobs_and_slurm_agree_on_sixty_requests_and_no_accepted_job_lacks_anything(
    sandbox: Sandbox, workdir: Path, name: str
) -> None:
    site = site_of(name)
    verdicts, lacking = [], []
    home = workdir / "ctld"
    home.mkdir()
    with nodeless(sandbox, name, site, home) as cluster:
        generated = requests(site, name)
        for _ in range(REQUESTS):
            each, lacks = verdict(cluster, site, next(generated))
            verdicts.append(each)
            if lacks:
                lacking.append((each.request, lacks))
    assert "\n".join(str(v) for v in verdicts if (v.ours is None) != (v.slurms is None)) == ""
    assert lacking == []
    refused = [v.slurms for v in verdicts if v.slurms is not None]
    assert 10 <= len(refused) <= 50
    assert [text for text in refused if hint_for(text) is None] == []
