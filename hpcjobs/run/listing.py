"""Lists the user's jobs: those submitted with hpcjobs, and the others in the queue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from hpcjobs.errors import CommandMissingError, SchedulerError
from hpcjobs.run import index
from hpcjobs.run.accounting_file import is_closed
from hpcjobs.run.adopt import read_index
from hpcjobs.run.foreign import find_ended, make_entries, scheduler_of, site_asked, without_known
from hpcjobs.run.identity import is_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.status import Connect, Known, parent_id, statuses
from hpcjobs.scheduler.base import JobRecord, Scheduler, State
from hpcjobs.scheduler.connect import connect

RECENT_S = 86_400.0
"""Jobs submitted within this time are listed even if they have ended."""
FORGOTTEN_S = 30 * 86_400.0
"""A job that its scheduler does not know is not asked about any more after this long."""


class ListedJob(NamedTuple):
    """One line of ``hpcjobs ps``; site and run folder are None for a job submitted by other means."""

    record: JobRecord
    name: str | None
    site: str | None
    run_dir: str | None


class Listing(NamedTuple):
    """The rows, and why a scheduler did not answer."""

    rows: list[ListedJob]
    errors: list[SchedulerError]


class Survey(NamedTuple):
    """Jobs with their entries, jobs submitted by other means, and what kept a scheduler from answering."""

    known: list[Known]
    others: list[JobRecord]
    errors: list[SchedulerError]


class _AskedOnce:
    """A scheduler whose queue is read once, also when it does not answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: list[JobRecord] | SchedulerError | None = None
        self.submit, self.account, self.cancel = scheduler.submit, scheduler.account, scheduler.cancel
        self.find_submitted = scheduler.find_submitted

    def queue(self) -> list[JobRecord]:
        if self._queue is None:
            try:
                self._queue = self._scheduler.queue()
            except SchedulerError as error:
                self._queue = error
        if isinstance(self._queue, SchedulerError):
            raise self._queue
        return self._queue


def survey(*, since: float, site: str | None = None, connect: Connect = connect) -> Survey:
    """My jobs submitted since ``since`` (seconds since 1970) and older ones that have not ended.

    A job that no scheduler knows any more, and whose run folder was removed, is left out.
    One queue query per scheduler, and one accounting query for those whose end is news. A scheduler
    that does not answer does not hide the jobs of the others.
    """
    schedulers: dict[tuple[str, str | None], _AskedOnce] = {}

    def once(kind: str, conf: str | None) -> Scheduler:
        if (kind, conf) not in schedulers:
            schedulers[kind, conf] = _AskedOnce(connect(kind, conf))
        return schedulers[kind, conf]

    where = site_asked(site)
    kind, conf = scheduler_of(where)
    errors: list[SchedulerError] = []
    try:
        queue = once(kind, conf).queue()
    except SchedulerError as error:
        queue, errors = [], [error]
    jobs = read_index()
    mine = _open_or_recent(jobs, queue, since)
    known = statuses(
        [e for e in mine if site is None or where is None or e.site == where.name], connect=once, errors=errors
    )
    index.close(job.entry for job in known if job.entry.submitted < since and _is_over(job))
    listed = [Known(job.entry, records) for job in known if (records := _select_records(job))]
    return Survey(listed, without_known(queue, mine), list(dict.fromkeys(errors)))


def select_unfinished(*, site: str | None = None, connect: Connect = connect) -> list[Entry]:
    """My jobs that have not ended, oldest first: also those that were requeued, whose run folder was removed, or that
    were submitted by other means.

    Raises:
        SchedulerError: none is known, and the scheduler does not answer.
    """
    known, others, errors = survey(since=time.time() - RECENT_S, site=site, connect=connect)
    if not known and errors and not isinstance(errors[0], CommandMissingError):
        raise errors[0]
    own = [job.entry for job in known if is_reachable(job.entry) and not all(r.state.ended for r in job.records)]
    return own + make_entries(others, site_asked(site))


def listing(
    *, since: float, site: str | None = None, ended_elsewhere: bool = False, connect: Connect = connect
) -> Listing:
    """The rows of a `survey`; ``ended_elsewhere``: also jobs submitted by other means that ended, by one sacct more."""
    known, others, errors = survey(since=since, site=site, connect=connect)
    if ended_elsewhere and not errors:
        jobs = index.read()
        try:
            others = find_ended([*jobs.entries, *jobs.removed], since=since, site=site) + others
        except SchedulerError as error:
            errors.append(error)
    rows = [
        ListedJob(record, job.entry.name, job.entry.site, job.entry.run_dir) for job in known for record in job.records
    ]
    rows += [ListedJob(record, record.name, None, None) for record in others]
    return Listing(rows, errors)


def _select_records(job: Known) -> list[JobRecord]:
    """The records to list: nothing is left of a job that nobody knows and whose run folder is gone."""
    if os.path.lexists(job.entry.run_dir):
        return job.records
    return [record for record in job.records if record.state is not State.UNKNOWN]


def _open_or_recent(jobs: index.Index, queue: Iterable[JobRecord], since: float) -> list[Entry]:
    """Jobs to list, and closed ones that may be in the queue again, requeued by hand."""
    queued = {parent_id(record.job_id) for record in queue}
    return [
        entry for entry in jobs.entries if entry.submitted >= since or jobs.is_open(entry) or entry.job_id in queued
    ]


def _is_over(job: Known) -> bool:
    """There is nothing more to come of it."""
    unknown = all(record.state is State.UNKNOWN for record in job.records)
    return is_closed(job.entry) or (unknown and time.time() - job.entry.submitted > FORGOTTEN_S)
