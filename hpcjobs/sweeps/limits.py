"""Reads how many tasks an array may have and how many jobs the queue takes, and cuts a sweep to fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.job.models import Job
from hpcjobs.processes.programs import Runner, run
from hpcjobs.slurm_commands import cluster_env, show_config

_LOCAL_TASKS = 10_000
_SLOTS_WORTH_SPLITTING = 8
"""With this many slots per chunk or more, chunks side by side idle less than one chunk after another."""


class Limits(NamedTuple):
    """The limits of one submission."""

    array_tasks: int
    """Tasks of one array: indices run from 0 to this, exclusive."""
    jobs: int | None = None
    """Jobs in the queue, array tasks counted one by one; None: no limit known."""


class Cut(NamedTuple):
    """One chunk: how many array tasks, how many of them at once, whether it waits for the chunk before it."""

    tasks: int
    throttle: int | None
    after_previous: bool


def read_limits(job: Job, *, max_submit_jobs: int | None, runner: Runner = run) -> Limits:
    """The limits where ``job`` runs: on a cluster one ``scontrol show config``; ``max_submit_jobs`` is the site's.

    Raises:
        SchedulerError: the controller did not answer.
    """
    if not job.kind.takes_sbatch_options:
        return Limits(_LOCAL_TASKS, max_submit_jobs)
    result = runner(show_config(), env=cluster_env(job.slurm_conf))
    if result.code != 0:
        raise SchedulerError(f"scontrol show config: {result.err.strip() or result.out.strip()}")
    return parse_config(result.out, jobs=max_submit_jobs)


def parse_config(text: str, *, jobs: int | None = None) -> Limits:
    """Limits in the output of ``scontrol show config``; ``jobs`` is the limit of the site file.

    Indices run from 0 to MaxArraySize - 1, so MaxArraySize tasks fit. MaxJobCount counts the jobs of all users.

    Raises:
        RequestError: the cluster has no job arrays.
    """
    settings = dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))
    tasks = int(settings.get("MaxArraySize", "1001"))
    if tasks < 1:
        raise RequestError(
            f"this cluster has no job arrays, which sweeps and scaling studies need: MaxArraySize is {tasks}"
            " (scontrol show config)",
            hint="submit the runs one by one: hpcjobs submit",
        )
    if fewer := re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", "")):
        tasks = min(tasks, int(fewer[1]))
    everybody = int(settings["MaxJobCount"]) - 1 if settings.get("MaxJobCount", "").isdigit() else None
    known = [limit for limit in (jobs, everybody) if limit is not None]
    return Limits(tasks, min(known, default=None))


def cuts(tasks: int, limits: Limits, *, max_parallel: int | None = None) -> list[Cut]:
    """``tasks`` array tasks as the fewest chunks that are allowed, never more than ``max_parallel`` running.

    Many slots are shared out over chunks that run side by side, sized by their share. Few are given to one
    chunk after another: split, a chunk with one slot would still run when all others are done.
    """
    most = limits.array_tasks
    if limits.jobs is not None:
        most = max(1, min(most, limits.jobs - 2))  # room for the job that submits the next chunk, and for its successor
    count = -(-tasks // most)
    if max_parallel is None or max_parallel >= tasks:
        return [Cut(size, None, False) for size in shares(tasks, count)]
    if count > 1 and max_parallel < count * _SLOTS_WORTH_SPLITTING:
        return [Cut(size, min(max_parallel, size), n > 0) for n, size in enumerate(shares(tasks, count))]
    slots = shares(max_parallel, count)
    sizes = _in_proportion(tasks, slots, most)
    return [Cut(size, min(slot, size), False) for size, slot in zip(sizes, slots, strict=True)]


def shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers that differ by at most one, the larger first."""
    each, rest = divmod(total, parts)
    return [each + (part < rest) for part in range(parts)]


def _in_proportion(total: int, weights: Sequence[int], most: int) -> list[int]:
    """``total`` split as ``weights``, none above ``most`` (there is room: see `cuts`)."""
    sizes = [min(most, total * weight // sum(weights)) for weight in weights]
    for part in range(len(sizes)):
        extra = min(most - sizes[part], total - sum(sizes))
        sizes[part] += extra
    return sizes
