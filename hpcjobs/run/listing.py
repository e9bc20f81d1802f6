"""My jobs: what was submitted with hpcjobs, and what else of mine is in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcjobs.run import index
from hpcjobs.run.folder import ACCOUNTING
from hpcjobs.run.status import Connect, statuses
from hpcjobs.scheduler.base import JobRecord, Scheduler
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.library import default_site, load_site


class Row(NamedTuple):
    """One line of ``hpcjobs ps``; site and run folder are None for a job submitted by other means."""

    record: JobRecord
    name: str | None
    site: str | None
    run_dir: str | None


class _Once:
    """A scheduler that is asked for its queue once, whoever wants to know."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: list[JobRecord] | None = None
        self.submit, self.account, self.cancel = scheduler.submit, scheduler.account, scheduler.cancel

    def queue(self) -> list[JobRecord]:
        if self._queue is None:
            self._queue = self._scheduler.queue()
        return self._queue


def listing(*, since: float, site: str | None = None, connect: Connect = connect) -> list[Row]:
    """My jobs submitted since ``since`` (seconds since 1970) and older ones that have not ended.

    One queue query per scheduler, and one accounting query for those whose end is news.
    """
    asked: dict[tuple[str, str | None], Scheduler] = {}

    def once(kind: str, conf: str | None) -> Scheduler:
        return asked.setdefault((kind, conf), _Once(connect(kind, conf)))

    where = load_site(site or default_site())
    entries = [entry for entry in index.entries() if site is None or entry.site == where.name]
    recent = [entry for entry in entries if entry.submitted >= since or not _closed(entry)]
    rows = [
        Row(record, record.name or known.entry.name, known.entry.site, known.entry.run_dir)
        for known in statuses(recent, connect=once)
        for record in known.records
    ]
    seen = {entry.job_id for entry in entries}
    others = once(where.scheduler, where.slurm_conf).queue()
    return rows + [Row(r, r.name, None, None) for r in others if r.job_id.split("_")[0] not in seen]


def _closed(entry: index.Entry) -> bool:
    """Accounted for, or its run folder is gone."""
    folder = Path(entry.run_dir)
    return (folder / ACCOUNTING).exists() or not folder.exists()
