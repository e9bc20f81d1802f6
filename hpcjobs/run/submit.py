"""Submits a plan as a job."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hpcjobs.errors import ConfigError, HpcJobsError, HpcJobsWarning, RequestError, SchedulerDownError
from hpcjobs.files import lock_file, state_dir
from hpcjobs.job.array import array_indices
from hpcjobs.job.limits import gpu_counts
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.deferred import defer_signals
from hpcjobs.run import folder, submission
from hpcjobs.run.folder import code_state
from hpcjobs.run.handle import JobHandle
from hpcjobs.scheduler.base import JobQueue
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.models import UNLIMITED
from hpcjobs.site.resources import option_of
from hpcjobs.site.trust import refusal_of_plan

VARIABLE: Final = "HPCJOBS_BUDGET"
_KEYS: Final = ("jobs", "node_hours", "cpu_hours", "gpu_hours")
_NAME: Final = "name"


@contextmanager
def count_against_budget(job: Job) -> Iterator[None]:
    """Submit ``job`` inside: it is counted first, with the most that it may use, and not if it was not accepted.

    Raises:
        ConfigError: the variable is not a budget. RequestError: the job could exceed the rest of it.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        yield
        return
    limits, amounts = _read_limits(text), _most_of(job)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    ledger = state_dir() / "budgets" / f"{digest[:16]}.jsonl"
    _append(ledger, job.name, amounts, limits)
    try:
        yield
    except (HpcJobsError, OSError) as error:
        if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
            _append(ledger, job.name, {key: -amount for key, amount in amounts.items()}, {})
        raise


def _read_limits(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == _NAME and value:
            continue
        try:
            amount = float(value)
        except ValueError:
            amount = math.nan
        if key not in _KEYS or key in limits or not 0 <= amount < math.inf:
            raise ConfigError(
                f"{VARIABLE}={text}: {part.strip() or 'nothing'} is no limit",
                hint=f"{VARIABLE}=gpu_hours=10,jobs=5; each of {', '.join(_KEYS)} once, with a number of 0 or more",
            )
        limits[key] = amount
    return limits


def _most_of(job: Job) -> dict[str, float]:
    """Of every task of an array, and of every attempt that ``--retries`` allows; infinite without a bound."""
    nodes = (job.max_nodes or job.nodes) + job.spare
    tasks = len(array_indices(job.resources.array)) if job.resources.array else 1
    retries = job.retries
    counts = [] if retries is None else [retries.timeout, retries.preempt, retries.node, retries.error]
    attempts = math.inf if UNLIMITED in counts else 1 + sum(counts)
    hours = math.inf if job.time_limit_s is None else tasks * attempts * job.time_limit_s / 3600
    cpus = job.ntasks_per_node * (job.resources.cpus_per_task or 1)
    gpus = max((count for _, count in gpu_counts(job, nodes)), default=0)
    factor = math.inf if job.resources.exclusive is True else 1
    return {
        "jobs": tasks,
        "node_hours": nodes * hours,
        "cpu_hours": nodes * cpus * hours * factor,
        "gpu_hours": gpus * hours * factor if gpus else 0.0,
    }


def _append(ledger: Path, name: str, amounts: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Add a line, unless with it the sums of the ledger would exceed ``limits``."""
    ledger.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ledger.open("a+", encoding="utf-8") as file:
        lock_file(file.fileno())
        file.seek(0)
        sums: Counter[str] = Counter()
        try:
            for line in file:
                sums.update(json.loads(line)["amounts"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{ledger} cannot be used: {error}", hint="remove it to begin to count anew") from error
        over = [key for key in limits if sums[key] + amounts[key] > limits[key] * (1 + 1e-9)]
        if over:
            raise RequestError(
                "\n".join(_describe(key, name, amounts[key], limits[key], sums[key]) for key in over),
                hint=f"fewer nodes, a shorter --time, bounded --retries (timeout=2,preempt=2); {VARIABLE} is"
                f" {os.environ.get(VARIABLE)}, and {ledger} has what was counted",
            )
        counted = {key: amount for key, amount in amounts.items() if math.isfinite(amount)}
        file.write(json.dumps({"time": time.time(), "name": name, "amounts": counted}) + "\n")


def _describe(key: str, name: str, amount: float, limit: float, used: float) -> str:
    most = f"{amount:.4g}" if math.isfinite(amount) else "an unknown number (no time limit, retries ∞ or --exclusive)"
    return f"job {name}: up to {most} {key}, and {limit - used:.4g} of {limit:.4g} are left of {VARIABLE}"


def submit(
    plan: Plan, *, scheduler: JobQueue | None = None, prepare: Callable[[Plan], None] | None = None
) -> JobHandle:
    """Write the run folder (``prepare`` adds to it), hand the script over, remember the job.

    A refused job leaves no files. A submission that a laptop repeats is submitted once: the first job is returned. If
    it is not known whether the scheduler took the job, the run folder stays, so that an accepted job finds it.

    Raises:
        RequestError: no plan was given, the run folder cannot be made, or another cluster would be asked about the job.
        ConfigError: it was made by an untrusted site file or template.
        SchedulerError: the scheduler refused, or did not answer.
    """
    if not isinstance(plan, Plan):
        raise RequestError(f"submit takes a plan, not {plan!r}", hint="hpcjobs.submit(hpcjobs.plan(PROGRAM, ...))")
    if plan.job.untrusted:
        raise refusal_of_plan(plan.job.untrusted)
    if (where := plan.job.sources.get("test_only")) is not None:
        raise RequestError(f"--test-only ({where}): the script is not to be submitted", hint="remove the option")
    _check_cluster(plan.job)
    target = scheduler or connect(plan.job.scheduler, plan.job.slurm_conf)
    once = submission.next_submission()
    if once is None:
        return _submit(plan, target, prepare)
    with submission.finish_without_terminal():
        if (entry := once.find_job(target)) is not None:
            at = time.strftime("%F %H:%M:%S", time.localtime(entry.submitted))
            text = f"job {entry.job_id} was submitted at {at} by the same command, whose answer got lost; not again"
            warnings.warn(text, HpcJobsWarning, stacklevel=2)
            return JobHandle(entry)
        once.begin(plan.run_dir)
        try:
            return _submit(plan, target, prepare)
        except HpcJobsError as error:
            if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
                once.forget()
            raise


def _check_cluster(job: Job) -> None:
    """Refuse a job for a cluster that Slurm's other commands would not ask about it.

    Raises:
        RequestError: names the variable to set.
    """
    if not job.kind.takes_sbatch_options or job.rehearsal:
        return
    named = [value for name, value in map(option_of, job.sbatch) if name == "clusters" and value]
    where = f"sbatch clusters={named[-1]} (site {job.site})" if named else "SBATCH_CLUSTERS (environment)"
    clusters = named[-1] if named else os.environ.get("SBATCH_CLUSTERS", "")
    if not clusters or {*clusters.split(",")} <= {*os.environ.get("SLURM_CLUSTERS", "").split(",")}:
        return
    raise RequestError(
        f"{where}: ps, wait and cancel would ask another cluster about the job",
        hint=f"export SLURM_CLUSTERS={clusters}, for every command",
    )


def _submit(plan: Plan, scheduler: JobQueue, prepare: Callable[[Plan], None] | None) -> JobHandle:
    folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        if prepare is not None:
            prepare(plan)
    except BaseException:
        folder.remove(plan)
        raise
    return hand_over(plan, scheduler, refused=folder.remove)


def hand_over(plan: Plan, scheduler: JobQueue, *, refused: Callable[[Plan], None] | None = None) -> JobHandle:
    """Submit the script in the plan's run folder, and record the job.

    A signal that would end this process comes after that: a job that the scheduler has accepted is always recorded.
    ``refused`` is called where no job was accepted.
    """
    with defer_signals() as deferred:
        submission.begin(plan)
        try:
            with count_against_budget(plan.job):
                accepted = scheduler.submit(plan)
        except (HpcJobsError, OSError) as error:
            if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
                if refused is not None:
                    refused(plan)
                submission.forget(plan.run_dir)
            raise
        handle = JobHandle(submission.remember(plan, accepted))
        if deferred:
            text = f"interrupted, and job {handle.id} was submitted before: hpcjobs cancel {handle.id} ends it"
            warnings.warn(text, HpcJobsWarning, stacklevel=2)
    return handle
