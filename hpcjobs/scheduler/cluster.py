"""The clusters whose jobs can be asked about from here, and the machine that local jobs run on.

Two clusters, or two workstations, may share one home and give out the same job ids: the name tells their jobs apart.
"""

from __future__ import annotations

import os

from hpcjobs.site.machine import EVERY_CLUSTER, cluster_name, named_clusters


def reachable_clusters(scheduler: str, slurm_conf: str | None) -> frozenset[str]:
    """The clusters whose jobs ``scheduler`` can be asked about from here; empty when the name cannot be learnt.

    For ``local`` that is this host. For Slurm it is the ClusterName, or the clusters in SLURM_CLUSTERS,
    which Slurm's commands ask in its place.
    """
    if scheduler == "local":
        return frozenset((os.uname().nodename,))
    if named := named_clusters():
        return frozenset() if EVERY_CLUSTER in named else named
    name = cluster_name(slurm_conf or os.environ.get("SLURM_CONF"))
    return frozenset(() if name is None else (name,))
