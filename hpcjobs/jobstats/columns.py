"""The columns of sacct, the columns of every report with their units, its filter, and the count of implausible rows.

Times are seconds since 1970 (UTC), durations end in ``_s``, sizes in ``_bytes``, energy in ``_j``; shares run
from 0 to 1. A null means that the value is unknown, never zero.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from typing import Final, NamedTuple

from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.scheduler.base import State
from hpcjobs.units import format_number, walltime_s


class JobFilter(NamedTuple):
    """Which jobs a report is about. None: not restricted."""

    since: float
    """Jobs that ended since then (seconds since 1970), and jobs that have not ended."""
    until: float | None = None
    users: tuple[str, ...] | None = None
    account: str | None = None
    states: tuple[str, ...] | None = None
    name: str | None = None
    """Shell pattern over job names."""
    job_ids: tuple[str, ...] | None = None
    """These jobs, whenever they ran."""
    cluster: str | None = None
    """Cluster of the site's slurmdbd, several with commas, or ``all``; default the site's own."""


Moment = str | float | date


def parse_moment(option: str, moment: Moment) -> float:
    """Seconds since 1970, from ``7d`` (back from now), a local date (``2026-11-01``, ``2026-11-01T12:00``) or a number.

    A date or datetime without a time zone is local, also one of pandas.

    Raises RequestError: none of these.
    """
    try:
        return _seconds(moment)
    except (TypeError, ValueError, OverflowError) as error:
        hint = "write how long ago: 7d, 12h or 30m; or a date: 2026-11-01"
        raise RequestError(f"{option} {moment}: not a time", hint=hint) from error


def _seconds(moment: Moment) -> float:
    if isinstance(moment, datetime):  # pandas counts a naive one as UTC
        return datetime.combine(moment.date(), moment.time(), moment.tzinfo).timestamp()
    if isinstance(moment, date):
        return datetime(moment.year, moment.month, moment.day).timestamp()
    if isinstance(moment, str) and len(moment) >= 10 and moment[4:5] == "-":
        return datetime.fromisoformat(moment).timestamp()
    seconds = time.time() - walltime_s(moment) if isinstance(moment, str) else float(moment)
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    return seconds


def check_states(option: str, states: Iterable[str]) -> None:
    """Raises RequestError if one is no state of a job."""
    for state in states:
        if state.upper() not in State.__members__:
            raise RequestError(f"{option} {state}: not a job state", hint=nearest(state.upper(), State.__members__))


# JobID comes first: it separates jobs from steps. The last two cannot contain a newline.
SACCT_COLUMNS: Final = (
    *("JobID", "JobIDRaw", "JobName", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Reason"),
    *("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NTasks", "NCPUS"),
    *("ReqMem", "ReqTRES", "AllocTRES", "NodeList", "TotalCPU", "MaxRSS", "AveRSS", "TRESUsageInTot"),
    *("TRESUsageInAve", "ConsumedEnergyRaw"),
)
OPTIONAL: Final = ("Restarts",)
"""Only where sacct has it (24.11 and later)."""
CLUSTER: Final = "Cluster"
"""Asked for where jobs of several clusters are: their ids are alike."""
NEEDED: Final = ("JobID", "State", "Submit", "Start", "End", "ElapsedRaw", "NCPUS", "NNodes")

# name -> (kind, meaning). Kinds: text, whole, real, time.
COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "job_id": ("text", "`123`, `123_4` (array task), `123+0` (heterogeneous component), `123_[5-9]` (tasks pending)"),
    "job_id_raw": ("text", "Slurm's own number of it"),
    "name": ("text", "as submitted"),
    "user": ("text", "who submitted it"),
    "account": ("text", "account that pays"),
    "partition": ("text", "partition it ran in, or the list it waits for"),
    "qos": ("text", "quality of service"),
    "state": ("text", "Slurm's name of it; UNKNOWN for a state that hpcjobs does not know"),
    "reason": ("text", "why it waits, or ended"),
    "exit_code": ("whole", "of the batch script, those above 127 without 128 (sacct); null while it runs"),
    "signal": ("whole", "signal that ended it"),
    "submitted": ("time", "of this attempt: a requeue counts as a new submission"),
    "eligible": ("time", "when it became able to start: dependencies met, hold released"),
    "started": ("time", "of this attempt"),
    "ended": ("time", "null while it runs"),
    "queue_wait_s": ("whole", "started - eligible; of a cancelled job that never ran, until its end"),
    "held_s": ("whole", "eligible - submitted"),
    "elapsed_s": ("whole", "of the last attempt"),
    "time_limit_s": ("whole", "requested; null: none"),
    "nodes": ("whole", "allocated; requested while it waits"),
    "tasks": ("whole", "most at once: of steps that ran together, without the batch script"),
    "cpus": ("whole", "allocated, as Slurm counts them"),
    "gpus": ("whole", "allocated"),
    "node_list": ("text", "in Slurm's notation"),
    "mem_requested_bytes": ("whole", "allocated on all nodes together"),
    "mem_used_bytes": (
        "whole",
        "most at once: the tasks' peaks over steps that ran together, without Slurm's extern step",
    ),
    "mem_per_node_bytes": (
        "whole",
        "estimate for the fullest node of any attempt: largest task x tasks, at most all of them; its steps together",
    ),
    "max_rss_bytes": ("whole", "of the largest task"),
    "mem_efficiency": ("real", "mem_used / mem_requested"),
    "cpu_s": ("real", "user and system time of all tasks"),
    "cpu_efficiency": ("real", "cpu_s / (cpus x elapsed_s)"),
    "gpu_utilization": (
        "real",
        "mean over time and GPUs of the steps that used GPUs; steps that share some add up; null: not measured",
    ),
    "gpu_mem_bytes": ("whole", "of all its GPUs at their peaks"),
    "gpu_source": ("text", "monitor (of the trainer, by NVML), or sacct (gres/gpuutil: steps by their length)"),
    "energy_j": ("real", "of all attempts"),
    "energy_source": ("text", "measured (node counters, job had its nodes alone), nvml (its GPUs) or modelled"),
    "cost": ("real", "of all attempts, by the site's prices"),
    "currency": ("text", "of cost"),
    "attempts": ("whole", "how often it was started: 1 + requeues"),
    "elapsed_all_s": ("whole", "of all attempts together"),
    "lost_s": ("real", "of attempts that no later one built on; of a last one, only if Slurm may put it back"),
    "goodput": ("real", "(elapsed_all - lost) / elapsed_all"),
    "goodput_source": ("text", "checkpoints (metrics of the run folder) or sacct (earlier attempts count as lost)"),
    "steps": ("whole", "rows of the accounting below the job"),
    "site": ("text", "site file"),
    "cluster": ("text", "cluster, of a report on several clusters"),
    "source": (
        "text",
        "where it was read: sacct, squeue, scontrol, job (its own state file), index (its submission) or local",
    ),
    "run_dir": ("text", "run folder, of a job submitted with hpcjobs; the tasks of an array share it"),
}


_UNITS: Final = {"_s": "seconds", "_bytes": "bytes", "_j": "joules"}
_KINDS: Final = {"text": "text", "time": "time, UTC", "whole": "count", "real": "share, 0 to 1"}


def unit_of(column: str) -> str:
    """The unit of a column of `COLUMNS`."""
    if column == "cost":
        return "money, see currency"
    units = (unit for ending, unit in _UNITS.items() if column.endswith(ending))
    return next(units, _KINDS[COLUMNS[column][0]])


def format_energy(joules: float | None, source: str | None) -> str:
    """Format energy, in Wh below one kWh; ``~`` where it is modelled, in full or in part."""
    if joules is None:
        return "-"
    hours = joules / 3600
    amount = f"{format_number(hours)} Wh" if hours < 1000 else f"{format_number(hours / 1000)} kWh"
    return amount if source == "measured" else f"~{amount}"


def choose(helpformat: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Choose the requested columns that this sacct has, JobID first, from the output of ``sacct --helpformat``.

    Args:
        more: columns that are requested besides the usual ones.

    Raises SchedulerError: it lacks one that no report can do without.
    """
    has = set(helpformat.split())
    if missing := [name for name in NEEDED if name not in has]:
        raise SchedulerError(f"this sacct has no column {', '.join(missing)}", hint="Slurm 20.11 or later is needed")
    return tuple(dict.fromkeys(name for name in ("JobID", *more, *OPTIONAL, *SACCT_COLUMNS) if name in has))


_MOST_EXAMPLES = 20


class Doubt(NamedTuple):
    """A kind of doubtful row: how many, and which (the first twenty)."""

    kind: str
    rows: int
    examples: tuple[str, ...]


class Doubts:
    """Collects rows that were left out or only partly used."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, kind: str, rows: Iterable[str]) -> None:
        """Count ``rows`` under ``kind``."""
        for row in rows:
            self._counts[kind] += 1
            examples = self._examples.setdefault(kind, [])
            if len(examples) < _MOST_EXAMPLES and row not in examples:
                examples.append(row)

    def by_frequency(self) -> list[Doubt]:
        """Every kind there is, the most frequent first."""
        return [Doubt(kind, count, tuple(self._examples[kind])) for kind, count in self._counts.most_common()]
