"""Where jobs stand, with the fewest questions.

The job's own state file is read first. One squeue covers every job that is still alive, one sacct
every job that has ended and was never accounted for; the accounted record is kept in the run folder
and not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.files import write_beside
from hpcjobs.job.array import array_indices, task_ids
from hpcjobs.run.attempts import current_id
from hpcjobs.run.folder import ACCOUNTING, STATE, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, Scheduler, State
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.models import Frozen

# Ends after which Slurm itself may put a job back: final once the queue has forgotten it.
_PUT_BACK = (
    *(State.PREEMPTED, State.NODE_FAIL, State.BOOT_FAIL, State.LAUNCH_FAILED, State.RECONFIG_FAIL),
    State.REQUEUED,
)
Connect = Callable[[str, "str | None"], Scheduler]


class FirstFailure(Frozen, frozen=True):
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


class Known(NamedTuple):
    """An entry and its records: one, or one per array task."""

    entry: Entry
    records: list[JobRecord]


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
    try:
        return msgspec.json.decode(path.read_bytes(), type=StateFile)
    except FileNotFoundError:
        return None


def statuses(entries: Iterable[Entry], *, connect: Connect = connect) -> list[Known]:
    """Where each of ``entries`` stands, in their order."""
    wanted = list(entries)
    known = {id(entry): _accounted(entry) for entry in wanted}
    open_ones = [entry for entry in wanted if known[id(entry)] is None]
    where = sorted(open_ones, key=_where)
    for (kind, conf), group in groupby(where, key=_where):
        members = list(group)
        for entry, records in zip(members, _ask(members, connect(kind, conf or None)), strict=True):
            known[id(entry)] = records
    return [Known(entry, known[id(entry)] or []) for entry in wanted]


def _where(entry: Entry) -> tuple[str, str]:
    return entry.scheduler, entry.slurm_conf or ""


def _accounted(entry: Entry) -> list[JobRecord] | None:
    try:
        kept = msgspec.json.decode((Path(entry.run_dir) / ACCOUNTING).read_bytes(), type=list[JobRecord])
    except FileNotFoundError:
        return None
    return _of(entry, {current_id(entry): kept})


def _ask(entries: list[Entry], scheduler: Scheduler) -> list[list[JobRecord]]:
    """One question about the living, one about those that are gone from the queue."""
    queued = _by_parent(scheduler.queue())
    gone = [current_id(entry) for entry in entries if all_ended(entry) or not _of(entry, queued)]
    accounted = _by_parent(scheduler.account(gone) if gone else [])
    return [_settle(entry, _of(entry, queued), _of(entry, accounted)) for entry in entries]


def all_ended(entry: Entry) -> bool:
    """Every task of the entry has written its end itself."""
    states = (read_state(entry, job_id) for job_id in own_ids(entry))
    return all(state is not None and state.state.ended for state in states)


def closed(entry: Entry) -> bool:
    """Accounted for, or its run folder is gone: there is nothing more to ask."""
    folder = Path(entry.run_dir)
    return (folder / ACCOUNTING).exists() or not folder.exists()


def _by_parent(records: Iterable[JobRecord]) -> dict[str, list[JobRecord]]:
    found: dict[str, list[JobRecord]] = {}
    for record in records:
        found.setdefault(record.job_id.split("_")[0], []).append(record)
    return found


def _of(entry: Entry, by_parent: dict[str, list[JobRecord]]) -> list[JobRecord]:
    """The entry's records: all of its job's, or those of the one array task that is meant.

    A job that another one carries on keeps its own id. The last task of an array is, for a moment, accounted for under
    the array's bare id, which only an array that was cancelled before it began keeps.
    """
    records = by_parent.get(current := current_id(entry), [])
    if entry.array is not None:
        records = [r for r in records if r.job_id != entry.job_id or r.state is State.CANCELLED]
    if current != entry.job_id:
        return [msgspec.structs.replace(record, job_id=entry.job_id) for record in records]
    if entry.task is None:
        return records
    (only,) = own_ids(entry)
    return [record for record in records if only in (*task_ids(record.job_id), f"{record.job_id}_{entry.task}")]


def _settle(entry: Entry, queued: list[JobRecord], accounted: list[JobRecord]) -> list[JobRecord]:
    """For each task the word that counts: the queue's while it is alive there (a requeued job is, whatever
    it wrote about its last attempt), else the accounting's, else the job's own."""
    put_back = any(record.state in _PUT_BACK for record in accounted)
    alive = [r for r in queued if not r.state.ended and (put_back or r.state is not State.COMPLETING)]
    if not alive and all(record.state.ended for record in accounted) and _whole(entry, accounted):
        keep_accounting(entry, accounted)
        return accounted
    told = {task for record in alive for task in task_ids(record.job_id)}
    final = [record for record in accounted if record.state.ended and told.isdisjoint(task_ids(record.job_id))]
    told |= {task for record in final for task in task_ids(record.job_id)}
    unheard = [task for task in own_ids(entry) if task not in told] if Path(entry.run_dir).exists() else []
    own = [own_record(entry, task) for task in unheard]
    return [*alive, *final, *(record for record in own if record is not None)] or [*queued] or [_unknown(entry)]


def _whole(entry: Entry, accounted: list[JobRecord]) -> bool:
    """Every task is there: the accounting of an array arrives task by task."""
    there = {task for record in accounted for task in (*task_ids(record.job_id), record.job_id)}
    return entry.job_id in there or there.issuperset(own_ids(entry))


def _unknown(entry: Entry) -> JobRecord:
    return JobRecord(job_id=entry.job_id, state=State.UNKNOWN, source="nobody", name=entry.name)


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


def keep_accounting(entry: Entry, records: list[JobRecord]) -> None:
    """Keep the scheduler's last word in the run folder, if that is still there."""
    folder = Path(entry.run_dir)
    if folder.is_dir() and entry.task is None:
        write_beside(folder / ACCOUNTING, msgspec.json.encode(records))
