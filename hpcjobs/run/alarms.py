"""Finds what needs attention in the newest sample of each of a job's nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hpcjobs.run.samples import NodeSample
from hpcjobs.units import human_bytes, human_duration

IDLE_S = 600.0
"""GPUs that are held and do nothing for so long."""
ENDED_S = 60.0
"""Ranks may end one after the other; one that is missing for longer, while others run, is dead."""
MEMORY_SHARE = 0.9
_BUSY, _WAITING, _APART = 90.0, 50.0, 0.6


class Alarm(NamedTuple):
    """One of the kinds `idle GPUs`, `dead rank`, `memory`, `load`, and what is printed."""

    host: str
    kind: str
    text: str


def find_alarms(nodes: Sequence[NodeSample]) -> list[Alarm]:
    """Held but idle GPUs, a dead rank, memory close to the limit, one node unlike the others."""
    alive = any(node.sample.ranks for node in nodes)
    return [alarm for node in nodes for alarm in _of_node(node, ranks_are_alive=alive)] + _unlike_the_others(nodes)


def idle_s(nodes: Sequence[NodeSample], *, expected: int) -> float | None:
    """How long every node has been idle: its GPUs, where it holds none its cores.

    None: fewer than the ``expected`` nodes have a sample, or one of them does not tell.
    """
    times = [node.sample.idle_s for node in nodes]
    return None if len(times) < expected or None in times else min(time for time in times if time is not None)


def _of_node(node: NodeSample, *, ranks_are_alive: bool) -> list[Alarm]:
    sample = node.sample
    alarms: list[Alarm] = []
    if sample.gpus and sample.idle_s is not None and sample.idle_s >= IDLE_S:
        what = "its GPU is" if sample.gpus == 1 else f"its {sample.gpus} GPUs are"
        text = f"{node.host}: {what} held and idle for {human_duration(sample.idle_s)}"
        alarms.append(Alarm(node.host, "idle GPUs", text))
    if sample.ended_ranks and ranks_are_alive and (sample.ended_s or 0.0) >= ENDED_S:
        ranks = ", ".join(map(str, sample.ended_ranks))
        plural = "ranks" if len(sample.ended_ranks) > 1 else "rank"
        text = f"{node.host}: {plural} {ranks} ended {human_duration(sample.ended_s or 0)} ago, others still run"
        alarms.append(Alarm(node.host, "dead rank", text))
    limit, used = sample.memory_limit_bytes, sample.rss_bytes
    if limit and used is not None and used >= MEMORY_SHARE * limit:
        text = f"{node.host}: memory {human_bytes(int(used))} of {human_bytes(int(limit))}"
        alarms.append(Alarm(node.host, "memory", text))
    return alarms


def _unlike_the_others(nodes: Sequence[NodeSample]) -> list[Alarm]:
    """The one node that works while the others wait for it, or that does nothing while the others work."""
    loads = {node.host: load for node in nodes if (load := node.sample.busy_percent) is not None}
    if len(loads) < 2 or len(loads) != len(nodes):
        return []
    alarms: list[Alarm] = []
    for host, load in loads.items():
        others = [value for name, value in loads.items() if name != host]
        usual = median(others)
        if load >= _BUSY and max(others) <= _APART * load:
            text = f"{host}: busy ({load:.0f} %) while the other nodes wait ({usual:.0f} %): it may be slow"
            alarms.append(Alarm(host, "load", text))
        elif len(loads) > 2 and min(others) >= _WAITING and load <= (1 - _APART) * min(others):
            text = f"{host}: nearly idle ({load:.0f} %) while the other nodes work ({usual:.0f} %)"
            alarms.append(Alarm(host, "load", text))
    return alarms
