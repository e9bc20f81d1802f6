"""HPCJOBS_BUDGET: what an environment, such as that of an agent, may submit in all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hpcjobs.errors import ConfigError, HpcJobsError, RequestError, SchedulerDownError
from hpcjobs.files import lock_file, state_dir
from hpcjobs.job.array import array_indices
from hpcjobs.job.limits import gpu_counts
from hpcjobs.job.models import Job
from hpcjobs.site.models import UNLIMITED, AppliedPolicy, Policy

VARIABLE: Final = "HPCJOBS_BUDGET"
_KEYS: Final = ("jobs", "node_hours", "cpu_hours", "gpu_hours")
_NAME: Final = "name"


@contextmanager
def count_against_budget(job: Job) -> Iterator[None]:
    """Submit ``job`` inside: it is counted first, with the most that it may use, and not if it was not accepted.

    Raises:
        ConfigError: the variable is no budget. RequestError: the job could exceed what is left of it.
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
    gpus = max((count for _, count in gpu_counts(job, AppliedPolicy("", Policy()), nodes)), default=0)
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
