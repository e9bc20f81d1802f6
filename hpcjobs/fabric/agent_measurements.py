"""Measurements by the agents of a check: which nodes answer and reach each other, how fast network and memory are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcjobs.fabric.nodes import Agent
from hpcjobs.fabric.verdict import NodeMeasurements

GREETING_S = 25.0
ANSWER_S = 15.0
STREAM_S = 0.3
ALL_PAIRS = 16
"""Where there are more nodes, each streams to so many others and not to all."""
Peers = dict[str, dict[str, Any]]
"""By host, what its agent said of itself: names, addresses and ports."""


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
    """A node's rate is that of its best pair, of which the slower direction counts: a slow peer is not its fault."""
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
