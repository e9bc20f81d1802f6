"""``python -m hpcjobs.fabric.check``: on the first node of a job, measures all of its nodes and says who is bad.

In this order, since each step trusts those who passed the one before:

    who answers      an agent on every node, each a step of its own, has `GREETING_S` to say its address
    who reaches whom round trips between all pairs, by the chosen interface and the names that trainers use
    how fast         streams between pairs, both ways, one pair of a node at a time; memory; the CUDA and MPI program
    GPUs             where the job has some, one process for each: products, memory, links, NCCL
    together         all-reduce of MPI, torch and Horovod over the nodes that are left

Writes ``fabric.json`` into the run folder, appends to the site's record of nodes, and ends with 19 if a node is bad.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from hpcjobs import gpu_errors
from hpcjobs.fabric.gpus import judge_gpus, parse_gpus
from hpcjobs.fabric.nodes import Agent, Failed, HostGroup, agents, run
from hpcjobs.fabric.report import Findings, collectives, gpu_table, remember, report, table
from hpcjobs.fabric.verdict import TOLERANCE, Judged, NodeVerdict, best, judge, outliers
from hpcjobs.files import write_beside
from hpcjobs.runtime.hostlist import hosts_of

NODE_IS_BAD = 19
QUICK_S = 60.0
"""A look before a job takes no longer, however many nodes it has: what is not measured by then stays so."""
FULL_S = 120.0
"""The full measurement likewise; what does not end by then is a note of the report."""
LEAVING_S = 5.0
GREETING_S = 25.0
ANSWER_S = 15.0
STREAM_S = 0.3
WRONG = "computes wrongly"
"""What the CUDA and MPI program says of a node whose products are not what they should be."""
AGAIN = 2
PROGRAM_S = 20.0
"""Kept for the CUDA and MPI program where time is short."""
ALLREDUCE_S = 25.0
"""Kept for each of torch and Horovod."""
GPUS_S = 25.0
"""Kept for the processes of the GPUs, most of it for loading torch."""
_BY_AGENTS = ("network_bytes_per_s", "memory_bytes_per_s")
_ALL_PAIRS = 16  # more nodes than these stream to so many others each, not to all


def check(
    place: HostGroup,
    folder: Path,
    *,
    quick: bool,
    tolerance: float,
    announce: Callable[[str], None] = lambda text: None,
) -> Findings:
    """Measure every node of ``place``; programs leave their figures in ``folder``. ``announce`` gets what comes next.

    Rates keep their best: while one is an outlier it is measured again, so that a moment's disturbance is not held
    against a node.
    """
    end = time.monotonic() + (QUICK_S if quick else FULL_S) - LEAVING_S
    with_gpus = requests_gpus(os.environ)
    until = (end if quick else end - 2 * ALLREDUCE_S) - (GPUS_S if with_gpus else 0.0)
    findings = Findings([NodeVerdict(host) for host in place.hosts])

    def begin(step: int, text: str) -> None:
        announce(f"step {step} of {3 if quick else 4}: {text}; at most {end - time.monotonic():.0f} s left")

    begin(1, f"do {len(place.hosts)} nodes answer")
    with agents(place) as all_agents:
        peers = _greet(all_agents, findings.nodes, suffix=place.suffix)
        present = [agent for agent in all_agents if agent.host in peers]
        if len(place.hosts) > 1:
            _reach(present, findings.nodes, peers)
        sound = [agent for agent in present if not _of(findings.nodes, agent.host).failures]
        begin(2, f"network and memory of {len(sound)} nodes")
        for _ in range(1 + AGAIN):
            began = time.monotonic()
            if len(sound) > 1:
                _stream(sound, findings.nodes, peers, until=until)
            _memory(sound, findings.nodes)
            again = _ends_before(until - PROGRAM_S, began)
            if not again or not outliers(findings.nodes, *_BY_AGENTS, tolerance=tolerance):
                break
    sound_nodes = [node for node in findings.nodes if not node.failures]
    if sound_nodes:
        begin(3, "matrix products")
        for _ in range(1 + AGAIN):
            began = time.monotonic()
            _multiply(place, sound_nodes, findings, folder, quick=quick, until=until)
            if not _ends_before(until, began) or not outliers(findings.nodes, "flops", tolerance=tolerance):
                break
        if with_gpus:
            begin(3, "GPUs, a process for each")
            gpus_until = end if quick or len(sound_nodes) == 1 else end - 2 * ALLREDUCE_S
            measure_gpus(place, sound_nodes, findings, folder, quick=quick, tolerance=tolerance, until=gpus_until)
            sound_nodes = [node for node in sound_nodes if not node.failures]
        if not quick and len(sound_nodes) > 1:
            begin(4, "all-reduce over the nodes")
            measure_allreduce(place, sound_nodes, findings, folder, until=end)
    return findings


def _ends_before(until: float, began: float) -> bool:
    """Whether what has been done since ``began`` could be done once more by then."""
    now = time.monotonic()
    return now + (now - began) < until


def _of(nodes: Sequence[NodeVerdict], host: str) -> NodeVerdict:
    return next(node for node in nodes if node.host == host)


def _greet(all_agents: Sequence[Agent], nodes: Sequence[NodeVerdict], *, suffix: str) -> dict[str, dict[str, Any]]:
    """The agents that came, by host, with where they listen."""
    deadline = time.monotonic() + GREETING_S
    peers = {}
    for agent in all_agents:
        hello = agent.answer(deadline)
        node = _of(nodes, agent.host)
        if hello is None:
            why = f" ({agent.complaint})" if agent.complaint else ""
            node.failures.append(f"did not answer within {GREETING_S:g} s{why}")
        elif "problem" in hello:
            node.failures.append(hello["problem"])
        else:
            node.address = hello.get("address")
            peers[agent.host] = hello | {"host": agent.host, "name": agent.host + suffix}
    return peers


def _reach(present: Sequence[Agent], nodes: Sequence[NodeVerdict], peers: dict[str, dict[str, Any]]) -> None:
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
            _of(nodes, host).failures.extend(list(problems.values())[:3])
        elif latencies[host]:
            _of(nodes, host).values["latency_s"] = sorted(latencies[host])[len(latencies[host]) // 2]


def rounds(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Pairs by rounds, each host in one pair of a round, as in a tournament: all pairs once, if they are few."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    for _ in range(min(len(ring) - 1, _ALL_PAIRS)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _stream(
    sound: Sequence[Agent], nodes: Sequence[NodeVerdict], peers: dict[str, dict[str, Any]], *, until: float
) -> None:
    """A node's rate is that of its best pair, of which the slower direction counts: a slow peer is not its fault."""
    by_host = {agent.host: agent for agent in sound}
    for pairs in rounds(list(by_host)):
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
                _keep_best(_of(nodes, host), "network_bytes_per_s", min(both_ways))


def _keep_best(node: NodeVerdict, metric: str, rate: float) -> None:
    node.values[metric] = max(node.values.get(metric, 0.0), rate)


def _memory(present: Sequence[Agent], nodes: Sequence[NodeVerdict]) -> None:
    for agent in present:
        agent.ask(do="memory")
    deadline = time.monotonic() + ANSWER_S
    for agent in present:
        result = agent.answer(deadline)
        if result is None:
            _of(nodes, agent.host).failures.append("stopped answering")
        else:
            _keep_best(_of(nodes, agent.host), "memory_bytes_per_s", result["bytes_per_s"])


def _multiply(
    place: HostGroup, sound: Sequence[NodeVerdict], findings: Findings, folder: Path, *, quick: bool, until: float
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
        _keep_best(node, "flops", gflops[_short(node.host)] * 1e9)
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
    sound: Sequence[NodeVerdict],
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
        return
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
    place: HostGroup, sound: Sequence[NodeVerdict], findings: Findings, folder: Path, *, until: float
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description=__doc__)
    parser.add_argument("--interface")
    parser.add_argument("--suffix", default="")
    parser.add_argument("--mpi")
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--record", type=Path, help="append the verdicts to this file")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--quick", action="store_true", help="no collectives")
    parser.add_argument("--choose", type=int, help="so many of the nodes are needed; the best are named in `chosen`")
    parser.add_argument("--keep-first", action="store_true", help="this node must be among those chosen")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    begun = time.monotonic()
    listed = os.environ.get("SLURM_JOB_NODELIST")
    hosts = tuple(hosts_of(listed)) if listed else (socket.gethostname(),)
    place = HostGroup(hosts, bool(listed), args.mpi, args.cpus_per_task, args.interface, args.suffix)
    folder = Path(os.environ["HPCJOBS_RUN_DIR"])
    (folder / "fabric").mkdir(exist_ok=True)
    findings = check(
        place,
        folder / "fabric",
        quick=args.quick,
        tolerance=args.tolerance,
        announce=lambda text: print(text, flush=True) if args.choose is None else None,  # not in a job's own log
    )
    judged = judge(findings.nodes, tolerance=args.tolerance)
    chosen = None if args.choose is None else best(judged, args.choose, keep=hosts[0] if args.keep_first else None)
    if args.record is not None and (problem := remember(args.record, judged)):
        findings.notes.append(problem)
    write_beside(
        folder / "fabric.json",
        json.dumps(report(findings, judged, chosen, took_s=time.monotonic() - begun), indent=1),
        mode=None,
    )
    for line in chain(
        table(judged), gpu_table(findings.gpus), collectives(findings), (f"note: {note}" for note in findings.notes)
    ):
        print(line, flush=True)
    return _settle(judged, chosen, args.choose, folder)


def _settle(judged: Sequence[Judged], chosen: list[str] | None, needed: int | None, folder: Path) -> int:
    """The exit code; where nodes are chosen, their names go to ``nodes.chosen``, one a line."""
    bad = [each.node.host for each in judged if not each.good]
    if needed is None or chosen is None:
        if bad:
            print(f"hpcjobs: bad: {', '.join(bad)}", flush=True)
        return NODE_IS_BAD if bad else 0
    if len(chosen) < needed:
        lack = f"{len(chosen)} are left" if chosen else "the first must be one of them"
        print(f"hpcjobs: {needed} good nodes are needed, and {lack}; bad: {', '.join(bad)}", flush=True)
        return NODE_IS_BAD
    write_beside(folder / "nodes.chosen", "".join(f"{host}\n" for host in chosen), mode=None)
    left = [each.node.host for each in judged if each.node.host not in chosen]
    print(f"hpcjobs: runs on {', '.join(chosen)}" + (f", without {', '.join(left)}" if left else ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
