"""Waiting for jobs to end, by watching the files they write."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from hpcjobs.errors import SchedulerError
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import all_ended, find_started, own_ids, own_record, read_accounting, tasks_of
from hpcjobs.run.select import is_never_met
from hpcjobs.run.status import Connect, Known, kept_or_written, require_reachable, statuses
from hpcjobs.scheduler.base import JobRecord, Outage, Report, State, connect, discard
from hpcjobs.units import task_ids

POLL_S = 0.5
"""Between looks at the state files, when there are few."""
PER_FILE_S = 0.005  # at most 200 files are looked at in a second: the file system is shared with everybody
QUEUE_S = 60.0
"""Between looks at the queue, for ends that no trap can write (a node's power, SIGKILL)."""
FOREIGN_S = 15.0
"""The same, where a job writes no state file because it was submitted by other means."""
OUTAGE_S = 10.0
"""Between questions about the end of jobs while the scheduler does not answer."""
_ACCOUNTING_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
_LATE_DELAYS_S = (10.0,) * 12
"""Further delays while only the accounting can know how a job ended."""
_RECENT_S = 300.0

Progress = Callable[[list[JobRecord]], None]
"""Called at every look with new states of the jobs, and with the answers of the scheduler.

A failure or cancellation that only the job itself reports is held back: the scheduler may know the cause, such as a
time limit. The final records contain it at the latest.
"""


class Watch:
    """Looks at jobs until they have ended: at their state files often, at the queue once a minute."""

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        progress: Progress | None = None,
        connect: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
        report: Report = discard,
    ) -> None:
        self._entries = list(entries)
        self._waiting = {job_id: entry for entry in self._entries for job_id in own_ids(entry)}
        self._progress = progress
        self._connect = connect
        self._clock = clock
        self._last_query = clock() - QUEUE_S  # the first look asks: a job may have ended that never wrote anything
        self.outage = Outage(report)
        self._stale: set[tuple[str, float | None]] = set()
        self._was_alive: set[str] = set()
        self._last_own: dict[str, JobRecord] = {}
        self._to_confirm: dict[str, Entry] = {}
        """Jobs with an end that the scheduler may explain better."""
        self._report = report

    def look(self) -> list[str]:
        """The ids that have not ended yet; empty when all have."""
        tasks: dict[int, list[str]] = {}
        for job_id, entry in self._waiting.items():
            tasks.setdefault(id(entry), []).append(job_id)
        own = [
            own_record(entry, job_id)
            for entry in self._entries
            for job_id in find_started(entry, tasks.get(id(entry), ()))
        ]
        written = {r.job_id: r for r in own if r is not None and (r.job_id, r.ended) not in self._stale}
        new = {job_id: record for job_id, record in written.items() if self._last_own.get(job_id) != record}
        self._last_own |= new
        self._to_confirm |= {job_id: self._waiting[job_id] for job_id, r in new.items() if _is_unconfirmed(r)}
        self._note(list(new.values()))
        if due := self._due():
            known = self.outage.ask(lambda: statuses(due, connect=self._connect)) or []
            self._note([record for one in known for record in one.records])
        return sorted(self._waiting)

    def again(self, known: Iterable[Known]) -> None:
        """Continue to watch jobs that were requeued; their own last end is out of date."""
        for entry, records in known:
            for task in (task for record in records if not record.state.ended for task in task_ids(record.job_id)):
                own = own_record(entry, task)
                self._waiting[task] = entry
                self._stale |= {(task, own.ended)} if own is not None else set()

    def final(
        self, *, pause: Callable[[float], None], check_timeout: Callable[[Iterable[str]], None] = lambda late: None
    ) -> list[Known] | None:
        """The scheduler's records of all jobs, once every one of them has written its end; None: it does not answer.

        Raises what ``check_timeout`` raises, which is called while the accounting of some jobs is late.
        """
        is_reported = False
        for delay in (*_ACCOUNTING_DELAYS_S, *_LATE_DELAYS_S, None):
            now = _ask_or_read(self._entries, self.outage, connect=self._connect)
            if now is None or self.outage.lasts:
                return now
            records = [record for _, job_records in now for record in job_records]
            if delay is None or all(_over(record) and record.source not in ("job", "nobody") for record in records):
                return now
            if delay in _LATE_DELAYS_S:
                if not (late := [record.job_id for record in records if self._is_uncertain(record)]):
                    return now
                if not is_reported:
                    if not self._may_be_told():
                        return now
                    self._report(f"job {', '.join(late)} has left the queue; waiting for its end in the accounting")
                    is_reported = True
                try:
                    check_timeout(late)
                except TimeoutError:
                    if all(record.state.ended for record in records):
                        return now  # as the jobs wrote it
                    raise
            pause(delay)
        raise AssertionError("unreachable: the last delay is None")

    def _may_be_told(self) -> bool:
        """Whether a scheduler of these jobs keeps an accounting, which may be late or away."""
        schedulers = {(entry.scheduler, entry.slurm_conf) for entry in self._entries}
        return any(self._connect(kind, conf).has_accounting() for kind, conf in schedulers)

    def _is_uncertain(self, record: JobRecord) -> bool:
        """Whether the job has just ended, and only the accounting knows how.

        A lost node lets no job write its end, and a job that is cancelled and one at its time limit write the same.
        """
        is_recent = record.ended is not None and time.time() - record.ended < _RECENT_S
        if record.source == "nobody":  # an end that `cancel` kept is recent, or it stays so
            return record.job_id in self._was_alive and (is_recent or not record.state.ended)
        return record.source == "job" and record.state is State.CANCELLED and is_recent

    @staticmethod
    def is_over(known: Iterable[Known]) -> bool:
        """All of them have ended, and none was requeued."""
        return all(_over(record) for _, records in known for record in records)

    def _due(self) -> list[Entry]:
        """Jobs to query now: local jobs always (a few file reads), the others once a minute."""
        # Only the scheduler knows the end of a job that was submitted by other means.
        is_foreign = any(entry.is_foreign for entry in self._waiting.values())
        due = self._clock() - self._last_query >= (FOREIGN_S if is_foreign else QUEUE_S)
        self._last_query = self._clock() if due else self._last_query
        waiting = {id(entry) for entry in (*self._waiting.values(), *self._to_confirm.values())}
        return [e for e in self._entries if id(e) in waiting and (due or not e.kind.has_nodes)]

    def _note(self, records: list[JobRecord]) -> None:
        certain = [record for record in records if not _is_unconfirmed(record)]
        for record in certain:
            self._to_confirm.pop(record.job_id, None)
        if self._progress is not None:
            self._progress(certain)
        alive = {task for record in records if not _over(record) for task in tasks_of(record)}
        self._was_alive |= {t for r in records if r.source != "job" and not _over(r) for t in tasks_of(r)}
        # A heterogeneous job ends with the last of its components.
        over = {task for record in filter(_over, records) for task in tasks_of(record)} - alive
        # An array that was cancelled before any task ran is one record, without a task's number.
        self._waiting = {
            task: entry for task, entry in self._waiting.items() if task not in over and entry.job_id not in over
        }


def wait(
    entries: Iterable[Entry],
    *,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> list[Known]:
    """Block until every one of ``entries`` has ended, and give their final records.

    Costs one squeue a minute in all while they run, and one sacct at the end (asked again for a few
    seconds while the accounting lags behind). Errors of a scheduler that has answered before are
    passed to ``report`` and survived.

    Raises RequestError: one of them belongs to another host, cluster or user, who alone can tell its end.
    SchedulerError: the scheduler does not answer the first question. TimeoutError: ``timeout_s`` seconds have passed.
    """
    all_entries = list(entries)
    require_reachable(entry for entry in all_entries if read_accounting(entry) is None)
    watch = Watch(all_entries, progress=progress, connect=connect, clock=clock, report=report)
    begun = clock()

    def check_timeout(waiting: Iterable[str]) -> None:
        if timeout_s is not None and clock() - begun >= timeout_s:
            ids = list(waiting)
            have = f"job {ids[0]} has" if len(ids) == 1 else f"jobs {', '.join(ids)} have"
            raise TimeoutError(f"{have} not ended after {timeout_s:g} s")

    while True:
        while waiting := watch.look():
            check_timeout(waiting)
            pause(max(POLL_S, len(waiting) * PER_FILE_S))
        known = watch.final(pause=pause, check_timeout=check_timeout)
        if known is None:  # only the scheduler knows how the jobs ended
            check_timeout(entry.job_id for entry in all_entries)
            pause(OUTAGE_S)
        elif watch.is_over(known):
            return known
        else:
            watch.again(known)


def _over(record: JobRecord) -> bool:
    """Whether the job has ended, is unknown to its scheduler, or waits for an impossible dependency."""
    forgotten = record.state is State.UNKNOWN and record.source == "nobody"
    return record.state.ended or forgotten or is_never_met(record)


def _is_unconfirmed(record: JobRecord) -> bool:
    """Whether only the job reports a failure or cancellation: at its time limit or out of memory it writes the same."""
    return record.source == "job" and record.state.ended and record.state is not State.COMPLETED


def _ask_or_read(all_entries: list[Entry], outage: Outage, *, connect: Connect) -> list[Known] | None:
    """The scheduler's records; while it does not answer, the jobs' own ends if all are written, otherwise None.

    Raises SchedulerError: it has never answered, and a job has not written its end.
    """
    try:
        now = outage.ask(lambda: statuses(all_entries, connect=connect))
    except SchedulerError:
        if not all(all_ended(entry) for entry in all_entries):
            raise
        return [Known(entry, kept_or_written(entry)) for entry in all_entries]
    if now is not None:
        return now
    ended = all(all_ended(entry) for entry in all_entries)
    return [Known(entry, kept_or_written(entry)) for entry in all_entries] if ended else None


def exit_code(known: Iterable[Known]) -> int:
    """The exit code of a waiting command: 0 if all jobs completed, otherwise the first other code."""
    codes = [_code(record) for job in known for record in job.records]
    return next((code for code in codes if code), 0)


def _code(record: JobRecord) -> int:
    if record.state is State.COMPLETED:
        return 0
    if record.exit_code:
        return record.exit_code
    # Slurm has no code of a job that it ended at its limit, or that was cancelled while it waited.
    taken_away = record.state in (State.CANCELLED, State.TIMEOUT)
    return 128 + (record.signal or signal.SIGTERM) if record.signal or taken_away else 1
