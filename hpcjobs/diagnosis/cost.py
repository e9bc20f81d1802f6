"""Computes what a job would cost at most."""

from __future__ import annotations

import msgspec

from hpcjobs.job.models import Job
from hpcjobs.site.models import Partition, Site


class Cost(msgspec.Struct, frozen=True):
    """What a job costs that runs until its time limit; ``amount`` None: the site file has no prices."""

    node_hours: float
    amount: float | None = None
    currency: str | None = None
    per_attempt: bool = False
    """The job has ``--retries``: each attempt may last so long."""


def estimate_cost(job: Job, site: Site) -> Cost | None:
    """What ``job`` costs at most, by the site's prices; None: it has no time limit."""
    if job.time_limit_s is None:
        return None
    hours = job.time_limit_s / 3600
    nodes = (job.max_nodes or job.nodes) + job.spare
    cpus, gpus = _charged_per_node(job, site)
    prices = site.prices
    rates = [(prices.node_hour, nodes), (prices.cpu_hour, nodes * cpus), (prices.gpu_hour, nodes * gpus)]
    amounts = [rate * count * hours for rate, count in rates if rate is not None]
    return Cost(
        nodes * hours,
        amount=sum(amounts) if amounts else None,
        currency=prices.currency if amounts else None,
        per_attempt=job.retries is not None,
    )


def _charged_per_node(job: Job, site: Site) -> tuple[int, int]:
    """CPUs and GPUs: with ``--exclusive`` Slurm allocates all that a node has, whatever the job requested."""
    partition: Partition | None = site.partitions.get((job.resources.partition or "").split(",")[0])
    if job.resources.exclusive is True and partition is not None:
        return partition.shape.cpus, partition.shape.gpus
    return job.ntasks_per_node * (job.resources.cpus_per_task or 1), job.gpus_per_node
