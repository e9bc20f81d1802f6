"""What two descriptions of one partition must agree on."""

from __future__ import annotations

from hpcjobs.site.models import Partition
from hpcjobs.units import time_limit_s


def facts(partition: Partition) -> tuple[object, ...]:
    """Nodes by shape and limits: a limit of all nodes is none, and so are no features."""
    groups = {(g.count, g.cpus, g.mem, g.gpus, g.gpu_model, g.features or ()) for g in partition.groups}
    limits = (partition.max_mem_per_node, partition.max_mem_per_cpu, partition.max_cpus_per_node)
    nodes = (partition.min_nodes or 1, min(partition.max_nodes or partition.node_count, partition.node_count))
    time = time_limit_s(partition.max_time)
    return (groups, nodes, time, *map(str, limits), partition.qos, partition.accounts, partition.default)
