"""Reasons for which Slurm refuses an array: the number of jobs in the queue, or the job itself."""

from __future__ import annotations

import re

from hpcjobs.job.models import Plan
from hpcjobs.processes.programs import Runner, run
from hpcjobs.slurm_commands import check_submission, cluster_env

# One generic text stands for every limit of accounts and QOS. Slurm prints the name of the limit beside it.
_LIMIT = re.compile(r"\b(?:Assoc|QOS)[A-Z]\w+")
_COUNT = re.compile(r"Submit", re.IGNORECASE)
_FULL = re.compile(r"MaxSubmit|job submit limit|MaxJobCount|temporarily unable to accept job", re.IGNORECASE)


def may_be_full(message: str) -> bool:
    """Whether a refusal can come from the number of jobs in the queue."""
    limits = _LIMIT.findall(message)
    return any(map(_COUNT.search, limits)) if limits else _FULL.search(message) is not None


def names_the_count(message: str) -> bool:
    """Whether a refusal can come from nothing else than the number of jobs in the queue."""
    return may_be_full(message) and (bool(_LIMIT.search(message)) or "job submit limit" not in message)


def largest_array(plan: Plan, tasks: int, *, runner: Runner = run) -> int:
    """The largest of ``tasks``, ``tasks / 2``, ``tasks / 4`` ... 1 tasks that sbatch would accept now; 0: none.

    ``sbatch --test-only`` checks the limits of account and QOS and submits nothing.
    """
    env = cluster_env(plan.job.slurm_conf)
    _, *options, script = plan.command
    options = [option for option in options if option != "--parsable"]
    while tasks > 0:
        argv = check_submission(*options, f"--array=0-{tasks - 1}", script)
        if runner(argv, cwd=plan.job.chdir, env=env).code == 0:
            return tasks
        tasks //= 2
    return 0
