"""Finds the user's jobs that were submitted by other means, with sbatch itself: the scheduler has all of them.

Such a job is an `Entry` without a run folder. What the scheduler says about it is all that is known.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from hpcjobs.job.array import array_text, task_ids
from hpcjobs.run.attempts import current_id
from hpcjobs.run.identity import is_ours, is_reachable, own_cluster, user_name
from hpcjobs.run.index import NO_FOLDER, Entry
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import parent_id
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.output_files import output_file
from hpcjobs.site.library import find_default_site, load_site
from hpcjobs.site.models import Site


def site_asked(site: str | None) -> Site | None:
    """The site whose queue is read for jobs submitted by other means; None: there is no default site."""
    name = site or find_default_site()
    return load_site(name) if name is not None else None


def scheduler_of(site: Site | None) -> tuple[str, str | None]:
    """Kind and slurm.conf of its scheduler; without a site, the Slurm that this login node belongs to."""
    return ("slurm", None) if site is None else (site.scheduler, site.slurm_conf)


def find_foreign(job_ids: Collection[str], known: Collection[Entry] = (), *, site: str | None = None) -> list[Entry]:
    """My jobs with these ids, as the scheduler of ``site`` has them: queued, running or ended.

    An id of a job of ``known`` is looked for in the queue alone, where another job may have it.

    Raises:
        SchedulerError: it does not answer.
    """
    where = site_asked(site)
    kind, conf = scheduler_of(where)
    if kind != "slurm" or not job_ids:
        return []
    taken = {entry.job_id for entry in known}
    here = [entry for entry in known if (entry.scheduler, entry.cluster) == (kind, own_cluster(kind, conf))]
    if not (to_find := {*job_ids} - (taken - {entry.job_id for entry in here})):
        return []
    slurm = _slurm(conf)
    records = without_known((r for r in slurm.queue() if parent_id(r.job_id) in to_find), here)
    in_full = {record.job_id for record in records if "_" not in record.job_id}  # tasks of an array leave one by one
    if rest := sorted(to_find - taken - in_full):
        remembered = [record for record in slurm.show_jobs(rest) if record.user == user_name()]
        records += remembered + slurm.history(user_name(), job_ids=rest)
    return make_entries(records, where)


def find_ended(known: Iterable[Entry], *, since: float, site: str | None = None) -> list[JobRecord]:
    """My jobs that ended after ``since`` (seconds since 1970) and are none of ``known``: one sacct.

    Raises:
        SchedulerError: neither the accounting nor the controller answers.
    """
    kind, conf = scheduler_of(site_asked(site))
    if kind != "slurm":
        return []
    ended = [record for record in _slurm(conf).history(user_name(), since=since) if record.state.ended]
    return without_known(ended, known)


def without_known(records: Iterable[JobRecord], known: Iterable[Entry]) -> list[JobRecord]:
    """Those of ``records`` that are about none of the jobs ``known``."""
    unknown = list(records)
    ids, names = {parent_id(record.job_id) for record in unknown}, {record.name for record in unknown}
    by_id: dict[str, list[Entry]] = {}
    carried_on = set()
    for entry in known:
        # Whether another job carries it on stands in its run folder: those of other names need not be read.
        if (entry.job_id in ids or entry.name in names) and is_reachable(entry):
            by_id.setdefault(current := current_id(entry), []).append(entry)
            carried_on |= {entry.job_id} - {current}
    return [
        record
        for record in unknown
        for job_id in (parent_id(record.job_id),)
        if job_id not in carried_on and not any(is_ours(entry, record) for entry in by_id.get(job_id, []))
    ]


def make_entries(records: Iterable[JobRecord], site: Site | None) -> list[Entry]:
    """One entry for each job of ``records``, oldest first; none for those of a local queue, which has its own list."""
    kind, conf = scheduler_of(site)
    if kind != "slurm":
        return []
    by_id: dict[str, list[JobRecord]] = {}
    for record in records:
        by_id.setdefault(parent_id(record.job_id), []).append(record)
    cluster = own_cluster(kind, conf) if by_id else None
    entries = []
    for job_id, own in by_id.items():
        tasks = {int(task) for r in own for _, bar, task in (t.partition("_") for t in task_ids(r.job_id)) if bar}
        entries.append(
            Entry(
                job_id,
                own[0].name or job_id,
                "-" if site is None else site.name,
                kind,
                f"{NO_FOLDER}/{job_id}",
                own[0].submitted or time.time(),
                cluster,
                conf,
                array_text(sorted(tasks)) if tasks else None,
                user=user_name(),
            )
        )
    return sorted(entries, key=lambda entry: entry.submitted)


def log_files(entry: Entry) -> list[Path]:
    """The files that the job, or each task of its array, prints to; of a job that Slurm has forgotten the default."""
    return [_log_file(job_id, entry.slurm_conf) for job_id in own_ids(entry)]


@cache
def _log_file(job_id: str, conf: str | None) -> Path:
    """Asked once in a command: no job changes its files."""
    return output_file(_slurm(conf), job_id) or Path(f"slurm-{job_id}.out").absolute()


def _slurm(conf: str | None) -> SlurmScheduler:
    scheduler = connect("slurm", conf)
    assert isinstance(scheduler, SlurmScheduler)
    return scheduler
