"""Estimates what a cluster costs by the site's own prices; it is never an offer."""

from __future__ import annotations

import msgspec

from hpcjobs.cloud.cluster import Cluster


class CostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Money per hour of the whole cluster, in ``currency``; ``None`` where the site has no prices.

    Per node: node_hour + GPUs x gpu_hour + CPUs x cpu_hour, whichever the site says; plus the head's own price.
    """

    nodes: int
    per_hour: float | None
    currency: str
    left_out: tuple[str, ...]
    """What the estimate does not hold."""


def estimate(cluster: Cluster) -> CostEstimate:
    """Estimate the cost of ``nodes.max`` nodes."""
    prices, nodes, head = cluster.site.prices, cluster.cloud.nodes.max, cluster.cloud.head.hour
    parts = (
        (prices.node_hour, 1),
        (prices.gpu_hour, cluster.gpus),
        (prices.cpu_hour, cluster.machine.cpus),
    )
    node = [price * count for price, count in parts if price is not None]
    left_out = ["disks and shared filesystem", "traffic", *(["the head"] if head is None else [])]
    if cluster.cloud.spot:
        left_out.append("what spot nodes cost less")
    per_hour = round(nodes * sum(node) + (head or 0), 4) if node else None
    return CostEstimate(nodes=nodes, per_hour=per_hour, currency=prices.currency, left_out=tuple(left_out))
