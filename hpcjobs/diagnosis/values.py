"""The values of a diagnosis: facts about a failed job, and the conclusion."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec


class Kind(Enum):
    """How much a line of a log says about the cause."""

    CAUSE = 0
    """Names a cause."""
    ERROR = 1
    """An error of the program, of no known kind."""
    CONSEQUENCE = 2
    """Errors of ranks because another rank has failed."""


class LogLine(msgspec.Struct, frozen=True):
    """One line of a log; ``text`` is without the label of its rank."""

    file: str
    number: int
    text: str
    rank: int | None = None
    host: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """The place of the first failure; None: not known."""

    source: str
    """Who reports it: a file of the run folder, a line of the log, the accounting."""
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: int | None = None


class Evidence(msgspec.Struct, frozen=True):
    """One fact, and where it was read."""

    source: str
    text: str


class StepRecord(NamedTuple):
    """The step of a job that used the most memory, by the accounting."""

    name: str
    state: str
    max_rss_bytes: int | None
    """Of one task."""
    node: str | None
    task: int | None


class JobFacts(msgspec.Struct, frozen=True):
    """All that is known about a job that has ended, before anything is concluded. None: not known."""

    job_id: str | None
    name: str | None = None
    site: str | None = None
    state: str | None = None
    """Slurm's word; None where only a log is given."""
    source: str | None = None
    """Who reported state and exit code: ``sacct``, ``scontrol``, ``job``."""
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    failed_nodes: tuple[str, ...] = ()
    """Nodes that went down while the job ran, or are down or drained now."""
    ranks_per_node: int | None = None
    cancelled_by: str | None = None
    elapsed_s: float | None = None
    time_limit_s: float | None = None
    mem_per_node_bytes: int | None = None
    """Memory that a node's tasks were allowed together."""
    out_of_memory: StepRecord | None = None
    """A step with the state OUT_OF_MEMORY, or with a task at the limit."""
    failure: Failure | None = None
    """The first failure, as the job itself recorded it."""
    decision: str | None = None
    """What hpcjobs decided after its last attempt: ``ended: `` and the reason, or ``requeued``."""
    logs: tuple[str, ...] = ()
    by_hpcjobs: bool = False
    is_own: bool = True
    """False: its run folder is a copy, or another user's; no command finds it by its id."""
    tasks_are_ranks: bool = True
    """A task of Slurm's is one rank; not where each task starts the ranks of its node (torchrun, mpirun)."""
    bundled_trainer: bool = False
    """Exit codes have the meaning of the bundled trainers."""
    run_dir: str | None = None
    python: str | None = None
    """The Python of its program."""
    image: str | None = None
    """The container image that its program ran in."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Why a job failed. ``cause`` is the name of a rule; None: unknown."""

    job_id: str | None
    name: str | None
    state: str | None
    cause: str | None
    text: str
    """The cause in words; for an unknown cause, the known facts."""
    certain: bool
    """False: the evidence fits, but does not prove it."""
    rank: int | None
    host: str | None
    exit_code: int | None
    signal: int | None
    line: LogLine | None
    """The line of the log that matters."""
    evidence: tuple[Evidence, ...]
    fix: tuple[str, ...]
    """Fixes, as commands if possible."""
    tail: tuple[str, ...] = ()
    """The last lines of the rank that failed first, where no line names the cause."""
    logs: tuple[str, ...] = ()
