"""The most that a job may use, for the budget of the environment (`hpcjobs.guards`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from hpcjobs import guards
from hpcjobs.guards import Amounts, GiveBack
from hpcjobs.job.fault_tolerance import named_nodes
from hpcjobs.job.layers import VARIABLES
from hpcjobs.job.limits import gpu_counts
from hpcjobs.job.models import Job
from hpcjobs.site.library import load_site
from hpcjobs.site.models import UNLIMITED
from hpcjobs.site.resources import FIELDS, GPU_FIELDS, OPTIONS, Hours, find_option, gpus_and_model, option_of
from hpcjobs.units import array_indices

Command = Literal["sbatch", "salloc", "submitit"]
"""What gets the job: submitit starts an sbatch that reads the environment itself."""
_GPU_OPTIONS = frozenset(("gres", *(OPTIONS[field.replace("_", "-")].name for field in GPU_FIELDS)))


def count_against_budget(job: Job, command: Command = "sbatch") -> AbstractContextManager[GiveBack]:
    """Submit ``job`` inside: it is counted first, with the most that it may use, and not if it was not accepted.

    Raises ConfigError: the variable is not a budget. RequestError: the job could exceed the rest of it.
    """
    if guards.budget_text() is None:
        return guards.count(job.name, Amounts(0, 0, 0, 0))
    return guards.count(job.name, most_of(job, command), find_unknown(job, command))


def find_unknown(job: Job, command: Command = "sbatch") -> tuple[str, ...]:
    """What ``job`` requests by options whose nodes, CPUs and GPUs hpcjobs does not count, each with its source."""
    return tuple(text for text, _ in _find_unknown(job, command))


def most_of(job: Job, command: Command = "sbatch") -> Amounts:
    """Of every task of an array, and of every attempt that ``--retries`` allows; infinite without a bound."""
    tasks = len(array_indices(job.resources.array)) if job.resources.array else 1
    retries = job.retries
    counts = [] if retries is None else [retries.timeout, retries.preempt, retries.node, retries.error]
    attempts = math.inf if UNLIMITED in counts else 1 + sum(counts)
    hours = math.inf if job.time_limit_s is None else tasks * attempts * job.time_limit_s / 3600
    size = _size(job)
    kinds = {hours for _, hours in _find_unknown(job, command)}
    unknown = math.inf if Hours.UNKNOWN in kinds else 1
    cpus = math.inf if Hours.CPUS in kinds else unknown
    return Amounts(
        tasks,
        *(
            count * hours * factor if count else 0.0
            for count, factor in zip(size, (unknown, cpus, unknown), strict=True)
        ),
    )


class _Size(NamedTuple):
    """Of the whole job, at most."""

    nodes: float
    cpus: float
    gpus: float


def _size(job: Job) -> _Size:
    """At most: a batch script that names no number of nodes may get one for each task, or for each GPU."""
    request = job.resources
    per_node = _count(request.ntasks_per_node) if job.batch_script is not None else job.ntasks_per_node
    nodes = (job.max_nodes or job.nodes) + job.spare
    total_gpus = _count_gpus(request.gpus, "gpus")
    by_gpu = total_gpus * (_count(request.ntasks_per_gpu) or 0)
    if job.kind.has_nodes:
        nodes = max(nodes, len(named_nodes(_text(request.nodelist))))
        if request.ntasks and per_node:
            nodes = max(nodes, -(-_count(request.ntasks) // per_node))
        if request.nodes is None:
            nodes = max(nodes, _count(request.ntasks), by_gpu, total_gpus)
    tasks = max(_count(request.ntasks) or nodes * (per_node or 1), by_gpu, nodes)
    gpus = max((count for _, count in gpu_counts(job, nodes)), default=0)
    gpus = max(gpus, tasks * _count_gpus(request.gpus_per_task, "gpus_per_task"))
    cpus = max(tasks * (_count(request.cpus_per_task) or 1), gpus * _count(request.cpus_per_gpu))
    node = _whole_node(job)
    return _Size(nodes, max(cpus, nodes * node.cpus), max(gpus, nodes * node.gpus))


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count_gpus(value: object, field: str) -> int:
    return gpus_and_model(value, field)[0] if isinstance(value, int | str) else 0


def _whole_node(job: Job) -> _Size:
    """What each node has that the job gets as a whole, by its options or by the site; nothing where nodes are shared.

    It is unknown with ``--exclusive``: a node may have more than the site file says of the typical one.
    """
    if job.resources.exclusive not in (None, False, "user", "mcs"):
        return _Size(1, math.inf, math.inf)
    if not job.kind.has_nodes:
        return _Size(0, 0, 0)
    site = load_site(job.site_file if os.path.isfile(job.site_file) else job.site)
    named = _text(job.resources.partition).split(",")
    partitions = [each for name, each in site.partitions.items() if name in named] or [*site.partitions.values()]
    if any(each.exclusive is True for each in (site.defaults, *(partition.defaults for partition in partitions))):
        return _Size(1, math.inf, math.inf)
    if not any(name in _GPU_OPTIONS and template is None for name, template in site.directives.items()):
        return _Size(0, 0, 0)
    groups = [group for partition in partitions for group in partition.groups]
    return _Size(1, max(group.cpus for group in groups), max(group.gpus for group in groups))


def _find_unknown(job: Job, command: Command) -> Iterator[tuple[str, Hours]]:
    request = job.resources
    if not job.kind.takes_sbatch_options:
        return
    for field, option in FIELDS.items():
        value = getattr(request, field)
        if value in (None, False) or option.hours not in (Hours.UNKNOWN, Hours.CPUS):
            continue
        # In a batch script Slurm may take them for a number of tasks.
        yield job.describe_option(field), Hours.UNKNOWN if job.batch_script is not None else option.hours
    if "*" in _text(request.constraint):
        yield job.describe_option("constraint"), Hours.UNKNOWN
    if "/" in _text(request.nodelist):
        yield job.describe_option("nodelist"), Hours.UNKNOWN
    for text in job.sbatch:
        known = find_option(option_of(text)[0])
        if known is None or known.hours is not Hours.NONE:
            yield f"sbatch {text}", Hours.UNKNOWN
    prefix = "SALLOC_" if command == "salloc" else "SBATCH_"
    for name in sorted(os.environ):
        beginning, _, rest = name.partition("_")
        if f"{beginning}_" != prefix or (rest in VARIABLES and command != "submitit"):
            continue
        known = OPTIONS.get("array" if rest == "ARRAY_INX" else rest.lower().replace("_", "-"))
        known = OPTIONS["time"] if rest == "TIMELIMIT" else known
        if known is not None and known.hours is not Hours.NONE and os.environ[name]:
            yield f"{name} (environment)", Hours.UNKNOWN
