"""Actions of the keys on a row: its log, why, cancel, a shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.processes.programs import own_command, run
from hpcjobs.run import logs
from hpcjobs.run.control import cancel
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.connect import connect
from hpcjobs.top.rows import JobRow

LINES = 500
"""So many lines of a log are shown."""


class Actions(Protocol):
    """Calls of the screen; each raises HpcJobsError with a text to show."""

    def read_log(self, row: JobRow) -> list[str]: ...
    def explain(self, row: JobRow) -> list[str]: ...
    def cancel(self, row: JobRow) -> str: ...
    def shell(self, row: JobRow) -> Sequence[str]: ...


class RealActions:
    """By the functions of the verbs `logs`, `why`, `cancel` and `shell`."""

    def __init__(self, *, slurm_conf: str | None = None) -> None:
        self._slurm_conf = slurm_conf

    def read_log(self, row: JobRow) -> list[str]:
        """Return the last lines of the row's log; of a folded row, of its most important task."""
        selection = logs.Selection(last=LINES)
        return [line.rstrip("\n") for line in logs.lines(_entry(row), selection=selection)][-LINES:]

    def explain(self, row: JobRow) -> list[str]:
        """Return the output of ``hpcjobs why``."""
        result = run(own_command("why", _name(row)))
        return (result.out + result.err).splitlines()

    def cancel(self, row: JobRow) -> str:
        """Cancel all tasks of the row; return the outcome as text."""
        own = _entries(row)
        if not own:
            ids = sorted({task.record.job_id for task in row.tasks if not task.record.state.ended})
            connect("slurm", self._slurm_conf).cancel(ids)
            return f"cancelled {' '.join(ids)}"
        outcome = cancel(own)
        if outcome.cancelled:
            return f"cancelled {' '.join(outcome.cancelled)}"
        if outcome.ended:
            return f"job {row.job} had ended before"
        raise RequestError(f"nothing cancelled: the scheduler does not know job {row.job}")

    def shell(self, row: JobRow) -> Sequence[str]:
        """The command that opens a shell on the first node of the row's job."""
        if row.first.record.state is not State.RUNNING:
            raise RequestError(f"job {row.job} is {row.first.record.state.value}: it has no node for a shell")
        _entry(row)
        return own_command("shell", _name(row))


def _entries(row: JobRow) -> list[Entry]:
    """The jobs of a row: one, the chunks of a sweep, or one task of an array."""
    if row.inside:
        return [_entry(row)] if row.first.entry is not None else []
    entries = [task.entry for task in row.tasks if task.entry is not None]
    return list({(entry.run_dir, entry.job_id): entry for entry in entries}.values())


def _entry(row: JobRow) -> Entry:
    task = row.first
    if task.entry is None:
        raise RequestError(f"job {row.job} was not submitted with hpcjobs, which does not know its run folder")
    _, _, index = task.record.job_id.partition("_")
    if task.entry.array is None or not index:
        return task.entry
    if not index.isdecimal():
        raise HpcJobsError(f"the tasks {task.record.job_id} wait together: choose the row of their array")
    return msgspec.structs.replace(task.entry, task=int(index))


def _name(row: JobRow) -> str:
    """How a command line names the row's job: by the run folder, which is one job's alone, if it can."""
    task = row.first
    if task.entry is None:
        return task.record.job_id.split("_[")[0]
    return task.record.job_id if task.entry.array is not None else task.entry.run_dir
