"""Reads the state that a job writes about itself, also from folders that others may have damaged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import read_regular
from hpcjobs.job.array import array_indices
from hpcjobs.run.folder import STATE, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State

T = TypeVar("T")


class FirstFailure(msgspec.Struct, frozen=True):
    """The rank that failed first."""

    rank: int
    host: str
    exit_code: int


class StateFile(msgspec.Struct, frozen=True):
    """What job.sh writes to ``state.json``. Times are seconds since 1970."""

    job_id: str
    state: State
    exit_code: int | None
    started: float | None
    ended: float | None
    nodes: str | None
    restarts: int = 0
    first_failure: FirstFailure | None = None
    cluster: str | None = None
    """SLURM_CLUSTER_NAME of the job."""
    array_job_id: str | None = None
    """Of a task of an array, whose ``job_id`` is the task's own in Slurm's books."""


def read_json(path: Path, type: type[T]) -> T | None:
    """The content of a file of a run folder; None where there is none, or, with a warning, none that can be used."""
    try:
        return msgspec.json.decode(read_regular(path), type=type)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    warnings.warn(f"{path} cannot be used: {reason}", HpcJobsWarning, stacklevel=2)
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
    return read_json(task_dir(Path(entry.run_dir), job_id) / STATE, StateFile)


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
