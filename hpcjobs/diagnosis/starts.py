"""When a job would start, and what it would cost at most: ``sbatch --test-only`` submits nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from hpcjobs.job.directives import sbatch_options
from hpcjobs.job.models import Job
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.slurm.start_estimate import parse_test_only
from hpcjobs.site.models import Partition, Site

_NOT_ESTIMATED = ("hold", "dependency")
"""Options for which Slurm has no estimate: the job is asked about as if it waited for nodes only."""
_PREFIX = re.compile(r"^(?:sbatch: )?(?:error: )?(?:allocation failure: )?")


class Estimate(msgspec.Struct, frozen=True):
    """Slurm's answer: when the job would start (seconds since 1970), or why it refuses it. None, None: no estimate."""

    start: float | None = None
    refusal: str | None = None


class Cost(msgspec.Struct, frozen=True):
    """What a job costs that runs until its time limit; ``amount`` None: the site file has no prices."""

    node_hours: float
    amount: float | None = None
    currency: str | None = None


def estimate_start(job: Job, *, runner: Runner = run) -> Estimate:
    """Slurm's estimate for ``job`` if it were submitted now."""
    words = [
        f"--{name}" if value is None else f"--{name}={value}"
        for name, value in sbatch_options(job)
        if name not in _NOT_ESTIMATED
    ]
    return estimate_options(words, slurm_conf=job.slurm_conf, cwd=job.chdir, runner=runner)


def estimate_options(
    options: Sequence[str], *, slurm_conf: str | None = None, cwd: str | None = None, runner: Runner = run
) -> Estimate:
    """Slurm's estimate for a job with these options of sbatch."""
    env = {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})
    answer = runner(["sbatch", "--test-only", *options, "--wrap=true"], cwd=cwd, env=env)
    if answer.code == 0:
        return Estimate(start=parse_test_only(f"{answer.err}\n{answer.out}"))
    lines = [line for line in (answer.err or answer.out).splitlines() if line.strip()]
    return Estimate(refusal=_PREFIX.sub("", lines[-1]) if lines else f"sbatch ended with exit code {answer.code}")


def estimate_cost(job: Job, site: Site) -> Cost | None:
    """What ``job`` costs at most, by the site's prices; None: it has no time limit."""
    if job.time_limit_s is None:
        return None
    hours = job.time_limit_s / 3600
    nodes = (job.max_nodes or job.nodes) + job.spare
    cpus, gpus = nodes * _cpus_per_node(job, site), nodes * job.gpus_per_node
    prices = site.prices
    rates = [(prices.node_hour, nodes), (prices.cpu_hour, cpus), (prices.gpu_hour, gpus)]
    amounts = [rate * count * hours for rate, count in rates if rate is not None]
    return Cost(nodes * hours, sum(amounts) if amounts else None, prices.currency if amounts else None)


def _cpus_per_node(job: Job, site: Site) -> int:
    partition: Partition | None = site.partitions.get((job.resources.partition or "").split(",")[0])
    if job.resources.exclusive and partition is not None:
        return partition.shape.cpus
    return job.ntasks_per_node * (job.resources.cpus_per_task or 1)
