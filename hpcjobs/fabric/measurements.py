"""Measurements of a check: network and memory by agents, products and all-reduce by the CUDA and MPI program."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcjobs import gpu_errors
from hpcjobs.fabric.nodes import Agent, Failed, HostGroup, run
from hpcjobs.fabric.report import Findings
from hpcjobs.fabric.verdict import NodeMeasurements, judge_gpus
from hpcjobs.record.fabric import AllReduce, GpuReport
from hpcjobs.record.values import convert

GREETING_S = 25.0
ANSWER_S = 15.0
STREAM_S = 0.3
ALL_PAIRS = 16
"""With more nodes, each node streams to this many others instead of all."""
Peers = dict[str, dict[str, Any]]
"""By host, the names, addresses and ports that its agent sent."""


def greet(all_agents: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], *, suffix: str) -> Peers:
    """The agents that came, by host, with where they listen."""
    deadline = time.monotonic() + GREETING_S
    peers = {}
    for agent in all_agents:
        hello = agent.answer(deadline)
        node = nodes[agent.host]
        if hello is None:
            why = f" ({agent.complaint})" if agent.complaint else ""
            node.failures.append(f"did not answer within {GREETING_S:g} s{why}")
        elif "problem" in hello:
            node.failures.append(hello["problem"])
        else:
            node.address = hello.get("address")
            peers[agent.host] = hello | {"host": agent.host, "name": agent.host + suffix}
    return peers


def measure_latency(present: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], peers: Peers) -> None:
    """Who cannot reach, or be reached by, more than half of the others is at fault; one pair alone is both's."""
    for agent in present:
        others = [peer for host, peer in peers.items() if host != agent.host]
        agent.ask(do="reach", me=peers[agent.host], peers=others)
    deadline = time.monotonic() + ANSWER_S
    broken: dict[str, dict[str, str]] = {host: {} for host in peers}
    latencies: dict[str, list[float]] = {host: [] for host in peers}
    for agent in present:
        for other, result in (agent.answer(deadline) or {}).items():
            if "problem" in result:
                broken[agent.host][other] = f"does not reach {other}: {result['problem']}"
                broken[other].setdefault(agent.host, f"{agent.host} does not reach it: {result['problem']}")
            else:
                latencies[agent.host].append(result["latency_s"])
    for host, problems in broken.items():
        if 2 * len(problems) > len(peers) - 1:
            nodes[host].failures.extend(list(problems.values())[:3])
        elif latencies[host]:
            nodes[host].values["latency_s"] = sorted(latencies[host])[len(latencies[host]) // 2]


def pair_hosts(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Pairs by rounds, each host in one pair of a round, as in a tournament: all pairs once, if they are few."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    for _ in range(min(len(ring) - 1, ALL_PAIRS)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_network(
    sound: Sequence[Agent], nodes: Mapping[str, NodeMeasurements], peers: Peers, *, until: float
) -> None:
    """A node has the rate of its best pair, in the slower direction: a slow peer is not its fault."""
    by_host = {agent.host: agent for agent in sound}
    for pairs in pair_hosts(list(by_host)):
        if time.monotonic() > until:
            return
        rates: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
        for forth in (True, False):
            ways = {pair: pair if forth else pair[::-1] for pair in pairs}
            for sender, receiver in ways.values():
                by_host[sender].ask(do="stream", me=peers[sender], peer=peers[receiver], seconds=STREAM_S)
            deadline = time.monotonic() + ANSWER_S
            for pair, (sender, _) in ways.items():
                result = by_host[sender].answer(deadline) or {}
                rates[pair].append(result.get("bytes_per_s", 0.0))
        for ends, both_ways in rates.items():
            for host in ends:
                nodes[host].keep_best("network_bytes_per_s", min(both_ways))


def measure_memory(present: Sequence[Agent], nodes: Mapping[str, NodeMeasurements]) -> None:
    for agent in present:
        agent.ask(do="memory")
    deadline = time.monotonic() + ANSWER_S
    for agent in present:
        result = agent.answer(deadline)
        if result is None:
            nodes[agent.host].failures.append("stopped answering")
        else:
            nodes[agent.host].keep_best("memory_bytes_per_s", result["bytes_per_s"])


WRONG = "computes wrongly"
"""Message of the CUDA and MPI program about a node with wrong products."""


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
        findings.allreduce["MPI"] = convert(figures["allreduce"], AllReduce)


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
    """Measure every GPU by one process each; a missing, broken, slow or wrong GPU is a failure of its node."""
    json_file = folder / "gpus.json"
    options = ["--json", str(json_file), *(["--no-collectives"] if quick else [])]
    left = list(sound)
    while left:
        hosts = [node.host for node in left]
        # Ranks of torch meet by MASTER_ADDR; a broken PMI of srun must not look like a broken GPU.
        command = place.module(hosts, "hpcjobs.trainers.metrics.gpus", *options, mpi="none")
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
    findings.gpus.extend(convert(figures["gpus"], list[GpuReport]))
    findings.allreduce.update(convert(figures["allreduce"], dict[str, AllReduce]))
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
        command = place.module(hosts, "hpcjobs.trainers.metrics.sweep", *arguments, mpi=place.mpi)
        share_s = max(1.0, (until - time.monotonic()) / (len(there) - index))
        try:
            run(command, env=place.world(hosts), timeout_s=share_s)
        except Failed as error:
            findings.notes.append(f"all-reduce of {package} over {len(hosts)} nodes not measured: {error}")
        else:
            figures = json.loads(json_file.read_text(encoding="utf-8"))
            findings.allreduce[figures["over"]] = convert(figures["allreduce"], AllReduce)
