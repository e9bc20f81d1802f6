"""Reads the state that a job writes about itself, also from folders that others may have damaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import read_regular
from hpcjobs.job.array import array_indices
from hpcjobs.record.names import STATE
from hpcjobs.record.state import StateFile, read_state_file
from hpcjobs.run.folder import task_dir
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord

T = TypeVar("T")


def read_json(path: Path, type: type[T]) -> T | None:
    """The content of a file of a run folder; None if it does not exist or, with a warning, if it cannot be used."""
    return read_usable(path, lambda: msgspec.json.decode(read_regular(path), type=type))


def read_usable(path: Path, read: Callable[[], T]) -> T | None:
    """Call ``read``, which reads ``path``; None if it does not exist or, with a warning, if it cannot be used."""
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        reason = str(error)
    warnings.warn(f"{path} cannot be used: {reason}", HpcJobsWarning, stacklevel=3)
    return None


def own_ids(entry: Entry) -> list[str]:
    """The ids of the entry's tasks: ``123`` or ``123_0 123_1 ...``."""
    if entry.array is None:
        return [entry.job_id]
    if entry.task is not None:
        return [f"{entry.job_id}_{entry.task}"]
    return [f"{entry.job_id}_{index}" for index in array_indices(entry.array)]


def read_state(entry: Entry, job_id: str) -> StateFile | None:
    """What the job itself last wrote; None before its script started."""
    path = task_dir(Path(entry.run_dir), job_id) / STATE
    return read_usable(path, lambda: read_state_file(path))


def all_ended(entry: Entry) -> bool:
    """Every task of the entry has written its end itself."""
    states = (read_state(entry, job_id) for job_id in own_ids(entry))
    return all(state is not None and state.state.ended for state in states)


def own_record(entry: Entry, job_id: str) -> JobRecord | None:
    """The state file as a record; None before the script started."""
    state = read_state(entry, job_id)
    if state is None:
        return None
    elapsed = state.ended - state.started if state.ended is not None and state.started is not None else None
    return JobRecord(
        job_id=job_id,
        state=state.state,
        source="job",
        name=entry.name,
        node_list=state.nodes,
        submitted=entry.submitted,
        started=state.started,
        ended=state.ended,
        elapsed_s=elapsed,
        exit_code=state.exit_code,
        restarts=state.restarts,
    )


def own_records(entry: Entry) -> list[JobRecord]:
    """The state files of the entry's tasks, as far as they have started."""
    return [record for record in (own_record(entry, task) for task in own_ids(entry)) if record is not None]
