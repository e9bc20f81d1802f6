"""Submitting what a sweep still lacks: once, whatever crashes, and never more than the queue takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.files import write_beside
from hpcjobs.job.array import task_ids
from hpcjobs.run import folder as run_folder
from hpcjobs.run.adopt import plan_in
from hpcjobs.run.index import Entry
from hpcjobs.run.provenance import code_state
from hpcjobs.run.submit import hand_over
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler.connect import connect
from hpcjobs.sweeps.folder import NOBODY, Chunk, Definition, SweepFolder
from hpcjobs.sweeps.limits import Limits, limits_of
from hpcjobs.sweeps.plans import following, prepare, tail_plan
from hpcjobs.sweeps.standing import OneLook, Standing, adopted, standings

_QUEUE_IS_FULL = re.compile(r"MaxSubmit|job submit limit|MaxJobCount|temporarily unable to accept job", re.IGNORECASE)
_TAIL = "tail.json"
_LATER = "now+5minutes"


class Outcome(NamedTuple):
    """What one call submitted."""

    submitted: list[Entry]
    cells: int
    """In these arrays."""
    waiting: int
    """Cells that the sweep itself will submit when the queue has room."""
    done: int
    open: int
    """Cells that were queued or running before."""


def start(folder: SweepFolder, definition: Definition, *, function: bytes | None = None) -> Outcome:
    """Say what is wanted, and submit the cells of it that are neither done nor on their way.

    Raises:
        SchedulerError: the scheduler refused or did not answer; what it took before stays recorded.
    """
    folder.make()
    with folder.locked():
        folder.define(definition)
        if function is not None:
            write_beside(folder.path / "function.pkl", function)
        return _submit_missing(folder, definition, OneLook(connect_to(definition)))


def resume(folder: SweepFolder) -> Outcome:
    """Submit the wanted cells that failed or are missing."""
    definition = folder.definition
    with folder.locked():
        return _submit_missing(folder, definition, OneLook(connect_to(definition)))


def proceed(folder: SweepFolder) -> Outcome:
    """Submit what was prepared but had no room: what the sweep's own job does."""
    definition = folder.definition
    with folder.locked():
        scheduler = OneLook(connect_to(definition))
        return _outcome(_hand_over_waiting(folder, definition, scheduler, _limits(definition)), folder, [])


def cancel(folder: SweepFolder) -> list[str]:
    """End every array of the sweep and submit nothing more; the ids that were cancelled."""
    definition = folder.definition
    with folder.locked():
        scheduler = OneLook(connect_to(definition))
        live = {record.job_id.split("_")[0] for record in scheduler.queue()}
        entries = [folder.entry(chunk) or adopted(folder, chunk, scheduler) for chunk in folder.chunks()]
        for chunk in _unsubmitted(folder):
            folder.give_up(chunk)
        ids = [entry.job_id for entry in [*entries, _tail(folder)] if entry is not None and entry.job_id in live]
        scheduler.cancel(ids)
        return ids


def connect_to(definition: Definition) -> Scheduler:
    """The scheduler the sweep's arrays are with."""
    return connect(definition.job.scheduler, definition.job.slurm_conf)


def _limits(definition: Definition) -> Limits:
    return limits_of(definition.job, max_submit_jobs=definition.max_submit_jobs)


def _submit_missing(folder: SweepFolder, definition: Definition, scheduler: Scheduler) -> Outcome:
    now = standings(folder, scheduler, certain=True)
    if not _tail_alive(folder, scheduler):
        for chunk in _unsubmitted(folder):
            if folder.give_up(chunk) != NOBODY:
                adopted(folder, chunk, scheduler)
        now = [_forgotten(standing, folder) for standing in now]
    wanted = [standing.cell for standing in now if standing.state is None or not (standing.open or _done(standing))]
    if not wanted:
        return _outcome([], folder, now)
    limits = _limits(definition)
    prepare(folder, definition, wanted, limits)
    return _outcome(_hand_over_waiting(folder, definition, scheduler, limits), folder, now)


def _done(standing: Standing) -> bool:
    return standing.state is not None and standing.state.value == "COMPLETED"


def _forgotten(standing: Standing, folder: SweepFolder) -> Standing:
    """A cell whose chunk has just been given up is nobody's again."""
    given_up = standing.chunk is not None and standing.job_id is None and folder.owner(standing.chunk) == NOBODY
    return standing._replace(state=None) if given_up and not _done(standing) else standing


def _unsubmitted(folder: SweepFolder) -> list[Chunk]:
    return [chunk for chunk in folder.chunks() if folder.entry(chunk) is None and folder.owner(chunk) != NOBODY]


def _hand_over_waiting(
    folder: SweepFolder, definition: Definition, scheduler: Scheduler, limits: Limits
) -> list[tuple[Chunk, Entry]]:
    """Submit the prepared chunks in order while there is room, then the job that will submit the rest."""
    waiting = _unsubmitted(folder)
    room = _room(limits, scheduler, sum(chunk.tasks for chunk in waiting))
    taken: list[tuple[Chunk, Entry]] = []
    for chunk in waiting:
        last = chunk is waiting[-1]
        if room is not None and chunk.tasks + (0 if last else 1) > room:
            break
        try:
            taken.append((chunk, _hand_over(folder, chunk, taken, scheduler)))
        except SchedulerError as error:
            if not _QUEUE_IS_FULL.search(error.message):
                raise
            break
        room = None if room is None else room - chunk.tasks
    if len(taken) < len(waiting):
        _submit_tail(folder, definition, scheduler, [entry.job_id for _, entry in taken])
    return taken


def _hand_over(folder: SweepFolder, chunk: Chunk, taken: Sequence[tuple[Chunk, Entry]], scheduler: Scheduler) -> Entry:
    plan = plan_in(folder.chunk_dir(chunk.number))
    before = [entry.job_id for earlier, entry in taken if earlier.number == chunk.after]
    return hand_over(following(plan, before), scheduler).entry


def _room(limits: Limits, scheduler: Scheduler, wanted: int) -> int | None:
    """How many more jobs the queue takes; asked only when it could be too few."""
    if limits.jobs is None or wanted < limits.jobs // 2:
        return None
    return limits.jobs - sum(len(task_ids(record.job_id)) for record in scheduler.queue())


def _submit_tail(folder: SweepFolder, definition: Definition, scheduler: Scheduler, after: Sequence[str]) -> None:
    """Submit the job that submits the rest: once the arrays before it have ended, else a little later."""
    number = sum(1 for _ in folder.path.glob("next-*")) + 1
    alive = after or _alive(folder, scheduler)
    begin = None if alive else _LATER
    plan = tail_plan(folder, definition, folder.path / f"next-{number:03d}", begin=begin)
    run_folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        entry = hand_over(following(plan, alive), scheduler).entry
    except SchedulerError as error:
        raise RequestError(
            f"the queue is full, also for the job that would submit the rest of {definition.name}: {error.message}",
            hint=f"hpcjobs sweep resume {definition.name} later; max_submit_jobs in the site file leaves room in time",
        ) from error
    write_beside(folder.path / _TAIL, msgspec.json.encode(entry))


def _alive(folder: SweepFolder, scheduler: Scheduler) -> list[str]:
    """The sweep's arrays that are in the queue."""
    entries = (folder.entry(chunk) for chunk in folder.chunks())
    ours = {entry.job_id for entry in entries if entry is not None}
    queued = {record.job_id.split("_")[0] for record in scheduler.queue()}
    return sorted(ours & queued)


def _tail_alive(folder: SweepFolder, scheduler: Scheduler) -> bool:
    tail = _tail(folder)
    return tail is not None and any(record.job_id == tail.job_id for record in scheduler.queue())


def _tail(folder: SweepFolder) -> Entry | None:
    try:
        return msgspec.json.decode((folder.path / _TAIL).read_bytes(), type=Entry)
    except FileNotFoundError:
        return None


def _outcome(taken: Sequence[tuple[Chunk, Entry]], folder: SweepFolder, before: Sequence[Standing]) -> Outcome:
    return Outcome(
        submitted=[entry for _, entry in taken],
        cells=sum(len(chunk.cells) for chunk, _ in taken),
        waiting=sum(len(chunk.cells) for chunk in _unsubmitted(folder)),
        done=sum(_done(standing) for standing in before),
        open=sum(standing.open for standing in before),
    )
