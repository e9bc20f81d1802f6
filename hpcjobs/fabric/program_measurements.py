"""Measurements by the programs of a check over the nodes: products of matrices, GPUs, and all-reduce."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hpcjobs import gpu_errors
from hpcjobs.fabric.gpus import judge_gpus, parse_gpus
from hpcjobs.fabric.nodes import Failed, HostGroup, run
from hpcjobs.fabric.report import Findings
from hpcjobs.fabric.verdict import NodeMeasurements

WRONG = "computes wrongly"
"""What the CUDA and MPI program says of a node whose products are not what they should be."""


def measure_products(
    place: HostGroup, sound: Sequence[NodeMeasurements], findings: Findings, folder: Path, *, quick: bool, until: float
) -> None:
    """The CUDA and MPI program over all nodes: a rate for each of them, and MPI's all-reduce."""
    hosts = [node.host for node in sound]
    json_file = folder / "matmul.json"
    options = ["--size", "512", "--matrices", "random", "--iterations", "200", "--json", str(json_file)]
    options += [] if quick or len(hosts) == 1 else ["--sweep", "64M"]
    command = place.module(hosts, "hpcjobs.fabric.matmul", *options, mpi=place.mpi)
    try:
        run(command, env=place.world(hosts), timeout_s=min(60.0, max(1.0, until - time.monotonic())))
    except Failed as error:
        wrong = [node for node in sound if f" on {_short(node.host)}: {WRONG}" in str(error)]
        for node in wrong:
            node.failures.append(str(error))
        if not wrong:
            findings.notes.append(f"products not measured: {error}")
        return
    figures = json.loads(json_file.read_text(encoding="utf-8"))
    gflops = {_short(rank["host"]): rank["gflops"] for rank in figures["ranks"]}
    for node in sound:
        node.keep_best("flops", gflops[_short(node.host)] * 1e9)
    if figures["allreduce"]:
        findings.allreduce["MPI"] = figures["allreduce"]


def requests_gpus(environ: Mapping[str, str]) -> bool:
    """Whether this job has GPUs; outside of Slurm, whether this machine shows some to it."""
    if "SLURM_JOB_ID" in environ:
        return environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0") or bool(environ.get("SLURM_JOB_GPUS"))
    drivers = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
    return environ.get("CUDA_VISIBLE_DEVICES") != "" and any(path.exists() for path in drivers)


def measure_gpus(
    place: HostGroup,
    sound: Sequence[NodeMeasurements],
    findings: Findings,
    folder: Path,
    *,
    quick: bool,
    tolerance: float,
    until: float,
) -> None:
    """Every GPU by a process of its own; one that is missing, broken, slow or wrong is a failure of its node."""
    json_file = folder / "gpus.json"
    options = ["--json", str(json_file), *(["--no-collectives"] if quick else [])]
    left = list(sound)
    while left:
        hosts = [node.host for node in left]
        # Ranks of torch meet by MASTER_ADDR; a broken PMI of srun must not look like a broken GPU.
        command = place.module(hosts, "hpcjobs.trainers.collectives.gpus", *options, mpi="none")
        try:
            run(command, env=place.world(hosts), timeout_s=min(60.0, max(1.0, until - time.monotonic())))
            break
        except Failed as error:
            bad = next((node for node in left if _names_fault(str(error), node.host)), None)
            if bad is None:
                findings.notes.append(f"GPUs not measured: {error}")
                return
            bad.failures.append(str(error))
            left.remove(bad)
    else:
        return  # each node has failed
    figures = json.loads(json_file.read_text(encoding="utf-8"))
    findings.gpus.extend(parse_gpus(figures))
    findings.allreduce.update(figures["allreduce"])
    problems = judge_gpus(findings.gpus, tolerance=tolerance)
    for node in left:
        node.failures.extend(problems.get(node.host, []))


def _names_fault(message: str, host: str) -> bool:
    """Whether the program that measures GPUs reports one that is missing or broken on this node."""
    kind = gpu_errors.classify(message)
    is_fault = "GPUs are visible" in message or (kind is not None and kind.effect == gpu_errors.FAULT)
    return is_fault and re.search(rf" on {re.escape(_short(host))}[.:]", message) is not None


def _short(host: str) -> str:
    """MPI may know a host by its full name."""
    return host.partition(".")[0]


def measure_allreduce(
    place: HostGroup, sound: Sequence[NodeMeasurements], findings: Findings, folder: Path, *, until: float
) -> None:
    """All-reduce as trainers do it, by torch and by Horovod, which share the time that is left."""
    hosts = [node.host for node in sound]
    there = [(over, package) for over, package in (("group", "torch"), ("horovod", "horovod")) if find_spec(package)]
    findings.notes.extend(
        f"all-reduce of {package} not measured: it is not installed"
        for package in ("torch", "horovod")
        if package not in dict(there).values()
    )
    for index, (over, package) in enumerate(there):
        json_file = folder / f"allreduce-{over}.json"
        arguments = ("--over", over, "--most", "16M", "--json", str(json_file))
        command = place.module(hosts, "hpcjobs.trainers.collectives.sweep", *arguments, mpi=place.mpi)
        share_s = max(1.0, (until - time.monotonic()) / (len(there) - index))
        try:
            run(command, env=place.world(hosts), timeout_s=share_s)
        except Failed as error:
            findings.notes.append(f"all-reduce of {package} over {len(hosts)} nodes not measured: {error}")
        else:
            figures = json.loads(json_file.read_text(encoding="utf-8"))
            findings.allreduce[figures["over"]] = figures["allreduce"]
