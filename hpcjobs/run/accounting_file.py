"""``accounting.json``: the scheduler's last records of a job, in its run folder: no second sacct."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import write_beside
from hpcjobs.job.array import task_ids
from hpcjobs.record.names import ACCOUNTING, STATE
from hpcjobs.record.state import StateFile
from hpcjobs.run.folder import task_dir
from hpcjobs.run.identity import CLOCK_TOLERANCE_S
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import own_ids, read_json, read_state
from hpcjobs.scheduler.base import JobRecord

FINAL_AFTER_S = 300.0
"""Seconds after the end of a job until its accounting record is final."""
_REQUEUE_S = 86_400.0


def read_accounting(entry: Entry) -> list[JobRecord] | None:
    """The records that were kept; None where there are none, or the job has started again since."""
    path = Path(entry.run_dir) / ACCOUNTING
    records = read_json(path, list[JobRecord])
    if records is None or any(_started_since(entry, task, path, records) for task in own_ids(entry)):
        return None
    return records


def _started_since(entry: Entry, task: str, path: Path, records: list[JobRecord]) -> bool:
    """The task wrote later than ``path`` was, and something else than the end in ``records``: it was requeued by hand.

    The times are the file server's, which makes them comparable.
    """
    try:
        if os.stat(task_dir(Path(entry.run_dir), task) / STATE).st_mtime <= os.stat(path).st_mtime:
            return False
    except OSError:
        return False
    state = read_state(entry, task)
    if state is None:
        return False
    own = [record for record in records if task in (*task_ids(record.job_id), record.job_id)]
    if any(record.restarts is not None and state.restarts > record.restarts for record in own):
        return True
    ends = [record.ended for record in own if record.ended is not None]
    return state.ended is None or not any(abs(state.ended - end) <= CLOCK_TOLERANCE_S for end in ends)


def may_be_requeued(entry: Entry, records: Iterable[JobRecord]) -> bool:
    """Slurm may still know the job, which `scontrol requeue` would start again."""
    ends = [record.ended for record in records if record.ended is not None]
    return entry.scheduler == "slurm" and bool(ends) and time.time() - max(ends) < _REQUEUE_S


def are_final(entry: Entry, records: Iterable[JobRecord]) -> bool:
    """Whether the records are final: in step with what the job wrote, or so old that nothing more will come.

    In the first moments after a short job's end the accounting may lack its name, or have the end before.
    """
    return all(_is_final(read_state(entry, task), record) for record in records for task in task_ids(record.job_id))


def _is_final(state: StateFile | None, record: JobRecord) -> bool:
    if record.ended is None:
        return True
    if state is not None and state.started is not None and state.started > record.ended + CLOCK_TOLERANCE_S:
        return False
    if record.source == "scontrol":  # slurmctld itself is never late, and soon forgets the job
        return True
    written_end = None if state is None else state.ended
    in_step = (
        record.name is not None and written_end is not None and abs(written_end - record.ended) <= CLOCK_TOLERANCE_S
    )
    return in_step or time.time() - record.ended >= FINAL_AFTER_S


def keep_accounting(entry: Entry, records: list[JobRecord]) -> None:
    """Keep the records in the run folder, if that is still there and ours to write."""
    folder = Path(entry.run_dir)
    if entry.task is not None or not os.path.isdir(folder):
        return
    # Which start of the job they are about: sacct does not print it.
    states = {record.job_id: read_state(entry, record.job_id) for record in records if record.restarts is None}
    with_starts = [
        record if (state := states.get(record.job_id)) is None else replace(record, restarts=state.restarts)
        for record in records
    ]
    try:
        write_beside(folder / ACCOUNTING, msgspec.json.encode(with_starts))
    except OSError as error:
        warnings.warn(f"{folder / ACCOUNTING} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2)


def drop_accounting(entry: Entry) -> None:
    """Forget the kept records of a job that is in the queue again."""
    with contextlib.suppress(OSError):
        (Path(entry.run_dir) / ACCOUNTING).unlink()


def is_closed(entry: Entry) -> bool:
    """Accounted for, or its run folder was removed: there is nothing more to ask."""
    try:
        os.stat(Path(entry.run_dir) / ACCOUNTING)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.lexists(entry.run_dir)
    except OSError:
        return False
