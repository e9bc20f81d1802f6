"""Status of each cell of a sweep, with as few commands of the scheduler as possible.

The state files of the cells are read first; if every cell has written its end, that is enough. Otherwise one squeue
covers all arrays, and one sacct covers the ended arrays without a stored accounting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from hpcjobs.files import read_regular, write_beside
from hpcjobs.record import STATE
from hpcjobs.record.state import StateFile, read_state_file
from hpcjobs.record.values import convert, to_json
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import own_ids, read_state, read_usable
from hpcjobs.run.status import is_ours, is_queued, owner_elsewhere, statuses
from hpcjobs.run.submission import adopt_job, plan_in, remember
from hpcjobs.scheduler.base import JobQueue, JobRecord, QueueReadOnce, State, Submitted
from hpcjobs.sweeps.cells import Cell
from hpcjobs.sweeps.folder import NOBODY, Chunk, SweepFolder
from hpcjobs.units import parent_id, task_ids

_FILE = "completed.json"


def read_states(folder: SweepFolder) -> dict[str, StateFile]:
    """The latest state of each started cell, by id. Cells that were completed before are not read again."""
    started = folder.started_cells()
    known = {cell: state for cell, state in _read_cache(folder).items() if cell in started}
    read = {cell: read_cell_state(folder, cell) for cell in started - known.keys()}
    new = {cell: state for cell, state in read.items() if state is not None}
    completed = {cell: state for cell, state in new.items() if state.state is State.COMPLETED}
    if completed:
        with contextlib.suppress(OSError):  # another user's folder, a full disk: the next call reads them again
            write_beside(folder.path / _FILE, msgspec.json.encode(to_json(known | completed)))
    return known | new


def _read_cache(folder: SweepFolder) -> dict[str, StateFile]:
    try:
        raw = msgspec.json.decode(read_regular(folder.path / _FILE), type=dict[str, dict[str, Any]])
        return {cell: convert(state, StateFile) for cell, state in raw.items()}
    except (OSError, ValueError, RecursionError):  # none yet, or of another version, or not one that can be used
        return {}


def read_cell_state(folder: SweepFolder, cell: str) -> StateFile | None:
    """The latest state of a cell; None before it starts, and, with a warning, if the file cannot be used."""
    path = folder.cell_dir(cell) / STATE
    return read_usable(path, lambda: read_state_file(path))


class CellStatus(NamedTuple):
    """Status of one cell; ``state`` None: it is in no array, and none that holds it will be submitted."""

    cell: Cell
    state: State | None
    job_id: str | None = None
    """``123_4``: the array task of the latest attempt."""
    chunk: Chunk | None = None
    own: StateFile | None = None
    """State file of the latest attempt."""
    record: JobRecord | None = None
    """The scheduler's record of the array task; None: not asked, or not known."""

    @property
    def open(self) -> bool:
        """Queued, running, or waiting to be submitted."""
        return self.state is not None and not self.state.ended

    @property
    def to_run_again(self) -> bool:
        """Failed or missing: ``resume`` submits it."""
        return not self.open and self.state is not State.COMPLETED


class _Attempt(NamedTuple):
    """The latest chunk of a cell, the chunk's job if it has one, and the cell's task."""

    chunk: Chunk
    entry: Entry | None
    task: int

    @property
    def job_id(self) -> str | None:
        return None if self.entry is None else f"{self.entry.job_id}_{self.task}"


def cell_statuses(folder: SweepFolder, scheduler: JobQueue, *, certain: bool = False) -> list[CellStatus]:
    """Status of every cell. ``certain``: ask the scheduler also about cells that say they failed (a requeued task does,
    until it starts again), and a second time about those that its queue and accounting lack: an answer may be cut."""
    scheduler = scheduler if isinstance(scheduler, QueueReadOnce) else QueueReadOnce(scheduler)
    cells = folder.definition.cells
    attempts = _attempts(folder, scheduler, folder.tail())  # the tail first: the queue is read after it is known
    states = read_states(folder)
    own = {cell.id: _own_state(states.get(cell.id), attempts.get(cell.id)) for cell in cells}
    open_entries = {
        attempt.entry.job_id: attempt.entry
        for cell in cells
        if (attempt := attempts.get(cell.id)) is not None
        and attempt.entry is not None
        and not _is_final(own[cell.id], certain=certain)
    }
    records = _records(open_entries.values(), scheduler)
    if certain:
        _confirm_ends(records, open_entries, scheduler)
    unsettled = [
        cell
        for cell, attempt in attempts.items()
        if attempt.entry is not None and not _is_final(own.get(cell), certain=False) and not _is_alive(records, attempt)
    ]
    # Their ends may have been written after their states were read, and before the queue was.
    for cell in folder.started_cells().intersection(unsettled) if unsettled else ():
        own[cell] = _own_state(read_cell_state(folder, cell), attempts[cell])
    return [_cell_status(cell, attempts.get(cell.id), own[cell.id], records) for cell in cells]


def tail_is_queued(folder: SweepFolder, scheduler: JobQueue) -> bool:
    """Whether the job that submits the rest of the sweep is in the queue, or has just submitted its successor."""
    tail = folder.tail()
    return tail is not None and _submits_the_rest(tail, folder, scheduler)


def _submits_the_rest(tail: Entry, folder: SweepFolder, scheduler: JobQueue) -> bool:
    return is_queued(tail, without_held(scheduler.queue())) or folder.tail() != tail


def without_held(queue: Iterable[JobRecord]) -> list[JobRecord]:
    """Jobs that start by themselves: a held one submits nothing."""
    return [record for record in queue if not record.is_held]


def _is_final(own: StateFile | None, *, certain: bool) -> bool:
    return own is not None and (own.state is State.COMPLETED or (own.state.ended and not certain))


def _attempts(folder: SweepFolder, scheduler: JobQueue, tail: Entry | None) -> dict[str, _Attempt]:
    """The latest attempt of every cell that was ever put into a chunk; chunks that are never submitted are left out."""
    latest: dict[str, _Attempt] = {}
    for chunk in folder.chunks():
        entry = folder.entry(chunk) or adopt_chunk(folder, chunk, scheduler)
        if entry is None and not _will_be_submitted(folder, chunk, scheduler, tail):
            continue
        latest |= {cell: _Attempt(chunk, entry, line // chunk.pack) for line, cell in enumerate(chunk.cells)}
    return latest


def _will_be_submitted(folder: SweepFolder, chunk: Chunk, scheduler: JobQueue, tail: Entry | None) -> bool:
    """Whether the sweep is being submitted: a process holds its lock, or the job that submits the rest exists."""
    if folder.owner(chunk) == NOBODY:
        return False
    served = folder.being_submitted() or (tail is not None and _submits_the_rest(tail, folder, scheduler))
    return served or folder.entry(chunk) is not None


def adopt_chunk(folder: SweepFolder, chunk: Chunk, scheduler: JobQueue) -> Entry | None:
    """Record the job of a chunk that was submitted by a process that ended before it recorded the job; return it."""
    owner = folder.owner(chunk)
    if owner == NOBODY or folder.foreign:
        return None
    if owner is None:
        return adopt_job(folder.chunk_dir(chunk.number), scheduler)
    return remember(plan_in(folder.chunk_dir(chunk.number)), Submitted(job_id=owner))


def _own_state(state: StateFile | None, attempt: _Attempt | None) -> StateFile | None:
    """The cell's state file, if it is about its latest attempt or a success."""
    latest = attempt is not None and state is not None and state.job_id == attempt.job_id
    return state if state is not None and (latest or state.state is State.COMPLETED) else None


def _records(entries: Iterable[Entry], scheduler: JobQueue) -> dict[str, JobRecord]:
    """Task id -> its record."""
    known = statuses(entries, connect=lambda kind, conf: scheduler)
    return {task: record for job in known for record in job.records for task in task_ids(record.job_id)}


def _confirm_ends(records: dict[str, JobRecord], entries: dict[str, Entry], scheduler: JobQueue) -> None:
    """Replace the records of tasks that neither the queue nor the accounting has by the controller's, if it has them.

    An answer of the queue may be cut, and a task that runs would be submitted again.
    """
    ids = {task: entry.job_id for entry in entries.values() for task in own_ids(entry)}
    unconfirmed = {task for task in ids if task not in records or records[task].source in ("job", "nobody")}
    shown = scheduler.show_jobs({ids[task] for task in unconfirmed}) if unconfirmed else []
    for record in shown:
        if record.state.ended or not is_ours(entries[parent_id(record.job_id)], record):
            continue
        for task in unconfirmed.intersection(task_ids(record.job_id)):
            has_written_end = task in records and records[task].source == "job"
            if not (has_written_end and record.state is State.COMPLETING):
                records[task] = record


def _is_alive(records: Mapping[str, JobRecord], attempt: _Attempt) -> bool:
    record = records.get(attempt.job_id or "")
    return record is not None and not record.state.ended and record.state is not State.UNKNOWN


def _cell_status(
    cell: Cell, attempt: _Attempt | None, own: StateFile | None, records: dict[str, JobRecord]
) -> CellStatus:
    if attempt is None:
        return CellStatus(cell, State.COMPLETED if own is not None else None, own=own)
    state = _state(attempt, own, records)
    return CellStatus(cell, state, attempt.job_id, attempt.chunk, own, records.get(attempt.job_id or ""))


def _was_requeued(attempt: _Attempt, own: StateFile) -> bool:
    """Whether the task has started again since the cell ended, so that it runs the cell once more."""
    if not own.state.ended or attempt.entry is None:
        return False
    task = read_state(attempt.entry, f"{attempt.entry.job_id}_{attempt.task}")
    return task is not None and (task.state.ended or task.restarts > own.restarts)


def _state(attempt: _Attempt, own: StateFile | None, records: Mapping[str, JobRecord]) -> State | None:
    """COMPLETED if the cell wrote that; otherwise the state in the queue, or after the task's end its last state."""
    if own is not None and own.state is State.COMPLETED:
        return State.COMPLETED
    if attempt.entry is None:
        return State.PENDING  # prepared; the sweep's own job will submit it
    record = records.get(attempt.job_id or "")
    if record is not None and _is_alive(records, attempt):
        if attempt.chunk.pack == 1 or record.state is not State.RUNNING:
            return record.state
        return State.PENDING if own is None or _was_requeued(attempt, own) else own.state
    if own is not None and own.state.ended:
        return own.state
    if record is None or record.state in (State.UNKNOWN, State.COMPLETED):
        return State.UNKNOWN if owner_elsewhere(attempt.entry) is not None else None
    return record.state
