"""Chooses the nodes that a job avoids: those that checks of the site have found bad."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from hpcjobs.errors import RequestError, UnknownJobError, nearest
from hpcjobs.fabric import node_record
from hpcjobs.runtime.hostlist import hosts_of

__all__ = ["avoided_on", "clear", "named_nodes", "record_of", "still_left_out"]
record_of = node_record.record_path


def avoided_on(site: str) -> dict[str, str]:
    """The nodes to leave out now, and why, as the site's record has it."""
    return {
        node: f"{standing.last.reason} (job {standing.last.job_id}, {time.strftime('%F %H:%M', _local(standing))})"
        for node, standing in node_record.find_avoided(record_of(site), time.time()).items()
    }


def _local(standing: node_record.Standing) -> time.struct_time:
    return time.localtime(standing.last.time)


def named_nodes(nodelist: str | None) -> set[str]:
    """The nodes that ``--nodelist`` names; none where it names a file of them, as it may (anything with a ``/``).

    Raises:
        RequestError: it is no list of hosts.
    """
    if not nodelist or "/" in nodelist:
        return set()
    try:
        return set(hosts_of(nodelist))
    except ValueError as error:
        raise RequestError(f"nodelist {nodelist!r}: {error}", hint="such as n1,n[03-05]") from error


def still_left_out(
    avoid: Mapping[str, str], *, nodes: int, nodelist: str | None, available: int | None
) -> dict[str, str]:
    """Those of ``avoid`` that the job can do without: none that it names, none if too few are ``available``."""
    named = named_nodes(nodelist)
    avoided = {node: why for node, why in avoid.items() if node not in named}
    too_few = available is not None and available - len(avoided) < nodes
    return {} if too_few else avoided


def standings(site: str) -> dict[str, node_record.Standing]:
    """Every node that there is a verdict on."""
    return node_record.standings(node_record.read(record_of(site)), time.time())


def clear(site: str, nodes: Iterable[str]) -> None:
    """Forget what is held against ``nodes``.

    Raises:
        UnknownJobError: there is no verdict on one of them; then nothing is forgotten.
    """
    requested, known = list(nodes), standings(site)
    for node in requested:
        if node not in known:
            raise UnknownJobError(f"node {node!r} has no record in {record_of(site)}", hint=nearest(node, known))
    node_record.append(
        record_of(site), [node_record.NodeVerdict(node, node_record.CLEARED, time.time()) for node in requested]
    )
