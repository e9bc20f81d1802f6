"""Limits of the environment on submitting and changing jobs: HPCJOBS_READ_ONLY and HPCJOBS_BUDGET."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from hpcjobs.errors import ConfigError, HpcJobsError, RequestError, SchedulerDownError
from hpcjobs.files import lock_file, make_folder, state_dir

READ_ONLY: Final = "HPCJOBS_READ_ONLY"
BUDGET: Final = "HPCJOBS_BUDGET"
BUDGET_DIR: Final = "HPCJOBS_BUDGET_DIR"
"""In a job: the folder of what was counted, wherever the job's own settings put its state."""
GiveBack = Callable[[], None]
"""Counts a submission back that was not accepted."""
_NAME: Final = "name"


class Amounts(NamedTuple):
    """The most that a submission may use; infinite without a bound."""

    jobs: float
    node_hours: float
    cpu_hours: float
    gpu_hours: float


def refuse_change(what: str) -> None:
    """Refuse ``what`` in a read-only environment: called where jobs, their records or machines are about to change.

    Raises RequestError: the environment is read-only.
    """
    if value := os.environ.get(READ_ONLY):
        raise RequestError(
            f"{what}: refused, because {READ_ONLY}={value} is set: nothing is submitted or changed here",
            hint="only verbs that read (ps, show, logs, why, report) and --dry-run work with it",
        )


def budget_text() -> str | None:
    """The budget of this environment; None: no budget."""
    return os.environ.get(BUDGET) or None


def limit_env(env: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """The variables ``env`` of a job, with this environment's budget: jobs that the job submits count too.

    Args:
        sources: where ``env.NAME`` was read.

    Raises RequestError: the job asks for another budget, or for another record of what was counted.
    """
    if (text := budget_text()) is None:
        return dict(env)
    own = {BUDGET: text, BUDGET_DIR: str(_ledger_dir())}
    for name, value in own.items():
        if env.get(name, value) != value:
            source = sources.get(f"env.{name}", "the site file")
            raise RequestError(
                f"env {name}={env[name]} ({source}): the budget here is {text}, and a job cannot have another",
                hint=f"remove {name} from env; the job gets the budget of the environment",
            )
    return {**env, **own}


def without_limits(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job of an earlier environment, without that one's budget."""
    return {name: value for name, value in env.items() if name not in (BUDGET, BUDGET_DIR)}


def _ledger_dir() -> Path:
    return Path(os.environ.get(BUDGET_DIR) or state_dir() / "budgets").absolute()


@contextmanager
def count(name: str, amounts: Amounts, unknown: Sequence[str] = ()) -> Iterator[GiveBack]:
    """Submit or change the job ``name`` inside: ``amounts`` is counted first, and not if the change was refused.

    Args:
        unknown: what makes an amount infinite, for the message.

    Raises ConfigError: the variable is not a budget, or the record of what was counted cannot be found or used.
    RequestError: the job could exceed the rest of it.
    """
    text = budget_text()
    if text is None:
        yield lambda: None
        return
    limits = _read_limits(text)
    folder = _ledger_dir()
    if os.environ.get(BUDGET_DIR) and not folder.is_dir():
        raise ConfigError(
            f"{BUDGET_DIR}={folder}: no such folder here, and what was counted for {BUDGET} cannot be read",
            hint="submit where the folder can be read; a job in a container needs it in the container",
        )
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    ledger = folder / f"{digest[:16]}.jsonl"
    _append(ledger, name, amounts, limits, unknown)

    def give_back() -> None:
        _append(ledger, name, Amounts(*(-amount for amount in amounts)), {}, ())

    try:
        yield give_back
    except (HpcJobsError, OSError) as error:
        if not (isinstance(error, SchedulerDownError) and error.maybe_taken):
            give_back()
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
        if key not in Amounts._fields or key in limits or not 0 <= amount < math.inf:
            raise ConfigError(
                f"{BUDGET}={text}: {part.strip() or 'nothing'} is no limit",
                hint=f"{BUDGET}=gpu_hours=10,jobs=5; each of {', '.join(Amounts._fields)} once, with a number of 0 or"
                " more",
            )
        limits[key] = amount
    return limits


def _append(ledger: Path, name: str, amounts: Amounts, limits: Mapping[str, float], unknown: Sequence[str]) -> None:
    """Add a line, unless with it the sums of the ledger would exceed ``limits``."""
    added = amounts._asdict()
    make_folder(ledger.parent)
    with ledger.open("a+", encoding="utf-8") as file:
        lock_file(file.fileno())
        file.seek(0)
        sums: Counter[str] = Counter()
        try:
            for line in file:
                sums.update(json.loads(line)["amounts"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{ledger} cannot be used: {error}", hint="remove it to begin to count anew") from error
        over = [key for key in limits if sums[key] + added[key] > limits[key] * (1 + 1e-9)]
        if over:
            raise RequestError(
                "\n".join(_describe(key, name, added[key], limits[key], sums[key], unknown) for key in over),
                hint=f"{_advice(over, unknown)}; {BUDGET} is {os.environ.get(BUDGET)}, and {ledger} has what was"
                " counted",
            )
        counted = {key: amount for key, amount in added.items() if math.isfinite(amount)}
        file.write(json.dumps({"time": time.time(), "name": name, "amounts": counted}) + "\n")


def _describe(key: str, name: str, amount: float, limit: float, used: float, unknown: Sequence[str]) -> str:
    why = ", ".join(unknown) or "no time limit, retries ∞, or nodes that are a job's own, as with --exclusive"
    most = f"{amount:.4g}" if math.isfinite(amount) else f"an unknown number ({why})"
    return f"job {name}: up to {most} {key}, and {limit - used:.4g} of {limit:.4g} are left of {BUDGET}"


def _advice(over: Sequence[str], unknown: Sequence[str]) -> str:
    if over == ["jobs"]:
        return "fewer tasks of an array or cells of a sweep, each of which is a job"
    if unknown:
        return "a budget counts no hours of these options: leave them out"
    return "fewer nodes (-N), a shorter --time, bounded --retries (timeout=2,preempt=2)"
