"""Waiting for jobs to end, by watching the files they write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hpcjobs.job.array import task_ids
from hpcjobs.run.index import Entry
from hpcjobs.run.status import Connect, Known, own_ids, own_record, statuses
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.connect import connect

POLL_S = 0.5
"""Between looks at the state files."""
QUEUE_S = 60.0
"""Between looks at the queue, for ends that no trap can write (a node's power, SIGKILL)."""
_ACCOUNTING_DELAYS_S = (0.5, 1.0, 2.0, 4.0)

Progress = Callable[[list[JobRecord]], None]
"""Called at every look with what is known, by the jobs themselves or by the scheduler."""


class Watch:
    """Looks at jobs until they have ended: at their state files often, at the queue once a minute."""

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        progress: Progress | None = None,
        connect: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = list(entries)
        self._waiting = {job_id: entry for entry in self._entries for job_id in own_ids(entry)}
        self._progress = progress
        self._connect = connect
        self._clock = clock
        self._asked = clock()
        self._stale: set[tuple[str, float | None]] = set()

    def look(self) -> list[str]:
        """The ids that have not ended yet; empty when all have."""
        own = [own_record(entry, job_id) for job_id, entry in self._waiting.items()]
        self._note([r for r in own if r is not None and (r.job_id, r.ended) not in self._stale])
        if asked := self._due():
            self._note([r for known in statuses(asked, connect=self._connect) for r in known.records])
        return sorted(self._waiting)

    def again(self, known: Iterable[Known]) -> None:
        """Watch on: these were requeued, so what they wrote about their last end is out of date."""
        for entry, records in known:
            for task in (task for record in records if not record.state.ended for task in task_ids(record.job_id)):
                own = own_record(entry, task)
                self._waiting[task] = entry
                self._stale |= {(task, own.ended)} if own is not None else set()

    def _due(self) -> list[Entry]:
        """Whom to ask about at this look: local jobs always (a few file reads), the others once a minute."""
        due = self._clock() - self._asked >= QUEUE_S
        self._asked = self._clock() if due else self._asked
        waiting = {id(entry) for entry in self._waiting.values()}
        return [e for e in self._entries if id(e) in waiting and (due or e.scheduler == "local")]

    def _note(self, records: list[JobRecord]) -> None:
        if self._progress is not None:
            self._progress(records)
        for record in filter(_over, records):
            for task in task_ids(record.job_id):
                self._waiting.pop(task, None)
            if record.source == "nobody":
                self._waiting = {task: e for task, e in self._waiting.items() if e.job_id != record.job_id}


def wait(
    entries: Iterable[Entry],
    *,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> list[Known]:
    """Block until every one of ``entries`` has ended, and give their final records.

    Costs one squeue a minute in all while they run, and one sacct at the end (asked again for a few
    seconds while the accounting lags behind).

    Raises:
        TimeoutError: ``timeout_s`` seconds have passed.
    """
    wanted = list(entries)
    watch = Watch(wanted, progress=progress, connect=connect, clock=clock)
    begun = clock()
    while True:
        while waiting := watch.look():
            if timeout_s is not None and clock() - begun >= timeout_s:
                raise TimeoutError(f"not ended after {timeout_s:g} s: {', '.join(waiting)}")
            pause(POLL_S)
        known = _final(wanted, connect=connect, pause=pause)
        if all(_over(record) for _, records in known for record in records):
            return known
        watch.again(known)


def _over(record: JobRecord) -> bool:
    """Ended, or forgotten by a scheduler that has been asked in vain."""
    return record.state.ended or (record.state is State.UNKNOWN and record.source == "nobody")


def _final(wanted: list[Entry], *, connect: Connect, pause: Callable[[float], None]) -> list[Known]:
    """The scheduler's word, waited for briefly: accounting arrives a moment after the job's end."""
    for delay in _ACCOUNTING_DELAYS_S:
        now = statuses(wanted, connect=connect)
        if all(_over(record) and record.source != "job" for _, records in now for record in records):
            return now
        pause(delay)
    return statuses(wanted, connect=connect)


def exit_code(known: Iterable[Known]) -> int:
    """The code a waiting command ends with: 0 if all completed, else the first one that is not 0."""
    codes = [_code(record) for job in known for record in job.records]
    return next((code for code in codes if code), 0)


def _code(record: JobRecord) -> int:
    if record.state is State.COMPLETED:
        return 0
    if record.exit_code:
        return record.exit_code
    return 128 + record.signal if record.signal else 1
