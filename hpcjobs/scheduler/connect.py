"""Connects to the scheduler of a job or site, and finds the clusters that can be reached from here.

Two clusters, or two workstations, may share one home and give out the same job ids. The name of the cluster or machine
distinguishes their jobs.
"""

from __future__ import annotations

import os

from hpcjobs.processes.programs import Runner
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler_kind import find_kind
from hpcjobs.site.machine import EVERY_CLUSTER, cluster_name, named_clusters


def connect(kind: str, slurm_conf: str | None = None, *, runner: Runner | None = None) -> Scheduler:
    """``slurm`` or ``local``; no command is started yet."""
    if kind == "local":
        from hpcjobs.scheduler.local.client import LocalScheduler

        return LocalScheduler()
    from hpcjobs.scheduler.slurm.client import SlurmScheduler

    return SlurmScheduler(slurm_conf) if runner is None else SlurmScheduler(slurm_conf, runner=runner)


def reachable_clusters(scheduler: str, slurm_conf: str | None) -> frozenset[str]:
    """The clusters that ``scheduler`` can query from here; empty: their name is unknown.

    For the queue of this machine that is this host. For Slurm it is the ClusterName; SLURM_CLUSTERS replaces it.
    """
    if not find_kind(scheduler).has_nodes:
        return frozenset((os.uname().nodename,))
    if named := named_clusters():
        return frozenset() if EVERY_CLUSTER in named else named
    name = cluster_name(slurm_conf or os.environ.get("SLURM_CONF"))
    return frozenset(() if name is None else (name,))
