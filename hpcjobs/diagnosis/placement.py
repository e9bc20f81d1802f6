"""Finds placements of a program over sites and partitions: validity, start and cost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job, JobSpec, Layer
from hpcjobs.job.plan import resolve_request
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.base import Estimate, connect
from hpcjobs.scheduler.slurm.job_queries import count_idle_nodes
from hpcjobs.site.checks import Moment
from hpcjobs.site.library import find_default_site
from hpcjobs.site.models import Partition, Site
from hpcjobs.slurm_commands import cluster_env

_SOON_S = 600.0
"""An estimate within this time is not explained: Slurm's own scheduling takes minutes."""


class Cost(msgspec.Struct, frozen=True):
    """Cost of a job that runs until its time limit; ``amount`` None: the site file has no prices."""

    node_hours: float
    amount: float | None = None
    currency: str | None = None
    per_attempt: bool = False
    """The job has ``--retries``: the cost holds for each attempt."""


def estimate_cost(job: Job, site: Site) -> Cost | None:
    """Largest cost of ``job``, by the site's prices; None: it has no time limit."""
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


class Placement(msgspec.Struct, frozen=True):
    """One site and partition for a job."""

    site: str
    partition: str | None
    is_valid: bool
    nodes: int | None = None
    time: str | None = None
    start: Moment | None = None
    """Seconds since 1970; None: not known."""
    cost: Cost | None = None
    remark: str | None = None
    """Why it is not valid, or why no start is known."""


def find_placements(request: JobSpec, sites: Iterable[Site], *, spec: Sequence[Layer] | Path = ()) -> list[Placement]:
    """Each partition of each site, best first: by start, then by cost; then those without an estimate."""
    rows = [row for site in sites for row in _on_site(request, site, spec)]
    return sorted(rows, key=_order)


def place(job: Job, site: Site, *, runner: Runner = run) -> Placement:
    """When a job that fits its site would start there, and its cost."""
    estimate, remark = Estimate(), None
    if job.kind.takes_sbatch_options:
        if can_ask(site):
            estimate = connect(job.scheduler, job.slurm_conf, runner=runner).estimate(job)
            without = None if estimate.start or estimate.refusal else "Slurm has no estimate"
            env = cluster_env(job.slurm_conf)
            late = explain_late_start(
                estimate.start, job.nodes + job.spare, job.resources.partition or None, env=env, runner=runner
            )
            remark = "; ".join(filter(None, (*estimate.messages, late or without))) or None
        else:
            remark = "no Slurm of this site answers here"
    return Placement(
        site=site.name,
        partition=job.resources.partition or None,
        is_valid=estimate.refusal is None,
        nodes=job.max_nodes or job.nodes,
        time=job.resources.time or None,
        start=estimate.start,
        cost=estimate_cost(job, site),
        remark=f"Slurm refuses it: {estimate.refusal}" if estimate.refusal else remark,
    )


def explain_late_start(
    start: float | None, nodes: int, partition: str | None, *, env: Mapping[str, str] | None, runner: Runner = run
) -> str | None:
    """Why Slurm's estimate may be too late: ``nodes`` nodes are idle. None: they are not, or the start is soon.

    Slurm counts every job up to its time limit, and looks at waiting jobs in intervals.
    """
    if start is None or start - time.time() < _SOON_S:
        return None
    idle = count_idle_nodes(partition, env=env, runner=runner)
    if idle < nodes:
        return None
    count = "1 node is" if idle == 1 else f"{idle} nodes are"
    return f"{count} idle now: it may start sooner than Slurm's estimate, which counts every job up to its time limit"


def can_ask(site: Site) -> bool:
    """Whether the Slurm of ``site`` answers commands of this machine."""
    if site.rehearsal:
        return True
    if shutil.which("sbatch") is None:
        return False
    return os.path.exists(site.slurm_conf) if site.slurm_conf else site.name == find_default_site()


def _on_site(request: JobSpec, site: Site, spec: Sequence[Layer] | Path) -> Iterator[Placement]:
    named = request.resources.partition
    unnamed: list[str | None] = [None] if site.chooses_partition or not site.kind.has_partitions else [*site.partitions]
    partitions = [named] if isinstance(named, str) else unnamed
    for partition in partitions:
        options = {} if partition is None else {"partition": partition}
        try:
            job = resolve_request(request, site, spec=spec, **options)
        except RequestError as error:
            lines = [line.strip() for line in error.message.splitlines()]
            yield Placement(site.name, partition, False, remark="; ".join(lines[1:] or lines))
            continue
        yield place(job, site)


def _order(row: Placement) -> tuple[bool, bool, float, float, str]:
    cost = row.cost.node_hours if row.cost is not None else float("inf")
    return not row.is_valid, row.start is None, row.start or 0.0, cost, row.site
