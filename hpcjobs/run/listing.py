"""My jobs: what was submitted with hpcjobs, and what else of mine is in the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import SchedulerError
from hpcjobs.run import index
from hpcjobs.run.attempts import current_id
from hpcjobs.run.status import Connect, closed, statuses
from hpcjobs.scheduler.base import JobRecord, Scheduler, State
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.library import default_site, load_site


class Row(NamedTuple):
    """One line of ``hpcjobs ps``; site and run folder are None for a job submitted by other means."""

    record: JobRecord
    name: str | None
    site: str | None
    run_dir: str | None


class Listing(NamedTuple):
    """The rows, and what kept a scheduler from answering."""

    rows: list[Row]
    errors: list[SchedulerError]


class _Asked:
    """A scheduler asked for its queue once, whoever wants to know; where it does not answer, its jobs
    are told as they themselves last wrote."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: list[JobRecord] | None = None
        self.error: SchedulerError | None = None
        self.submit, self.cancel = scheduler.submit, scheduler.cancel

    def queue(self) -> list[JobRecord]:
        if self._queue is None:
            self._queue = self._or_nothing(self._scheduler.queue)
        return self._queue

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return self._or_nothing(lambda: self._scheduler.account(job_ids))

    def _or_nothing(self, ask: Callable[[], list[JobRecord]]) -> list[JobRecord]:
        if self.error is not None:
            return []
        try:
            return ask()
        except SchedulerError as error:
            self.error = error
            return []


def listing(*, since: float, site: str | None = None, connect: Connect = connect) -> Listing:
    """My jobs submitted since ``since`` (seconds since 1970) and older ones that have not ended.

    A job nobody knows any more, whose run folder is gone too, is left out.
    One queue query per scheduler, and one accounting query for those whose end is news. A scheduler
    that does not answer does not hide the jobs of the others.
    """
    asked: dict[tuple[str, str | None], _Asked] = {}

    def once(kind: str, conf: str | None) -> Scheduler:
        if (kind, conf) not in asked:
            asked[kind, conf] = _Asked(connect(kind, conf))
        return asked[kind, conf]

    where = load_site(site or default_site())
    entries = [entry for entry in index.entries() if site is None or entry.site == where.name]
    recent = [entry for entry in entries if entry.submitted >= since or not closed(entry)]
    rows = [
        Row(record, known.entry.name, known.entry.site, known.entry.run_dir)
        for known in statuses(recent, connect=once)
        for record in known.records
        if record.state is not State.UNKNOWN or Path(known.entry.run_dir).exists()
    ]
    seen = {job_id for entry in entries for job_id in (entry.job_id, current_id(entry))}
    others = once(where.scheduler, where.slurm_conf).queue()
    rows += [Row(record, record.name, None, None) for record in others if record.job_id.split("_")[0] not in seen]
    return Listing(rows, [scheduler.error for scheduler in asked.values() if scheduler.error is not None])
