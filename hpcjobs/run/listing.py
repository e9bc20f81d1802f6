"""Lists the user's jobs: submitted with hpcjobs, or known to the scheduler alone.

A job that was submitted by other means, such as sbatch, is an `Entry` without a run folder: only the scheduler's record
is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import CommandMissingError, SchedulerError
from hpcjobs.files import user_name
from hpcjobs.run import index
from hpcjobs.run.index import NO_FOLDER, Entry
from hpcjobs.run.job_files import CLOCK_TOLERANCE_S, FORGOTTEN_S, current_id, is_closed, own_ids
from hpcjobs.run.status import (
    Connect,
    ConnectQueue,
    Known,
    by_job,
    first_submitted,
    is_ours,
    is_reachable,
    own_cluster,
    statuses,
)
from hpcjobs.run.submission import read_index
from hpcjobs.scheduler.base import JobQueue, JobRecord, QueueReadOnce, State, connect
from hpcjobs.scheduler.slurm.outputs import output_file
from hpcjobs.scheduler_kind import CLUSTER, find_kind
from hpcjobs.site.library import site_to_look_at
from hpcjobs.site.models import Site
from hpcjobs.units import array_text, parent_id, task_ids


def site_asked(site: str | None) -> Site | None:
    """The site to query for jobs submitted by other means; None without a default site."""
    return site_to_look_at(site)


def scheduler_of(site: Site | None) -> tuple[str, str | None]:
    """Kind and slurm.conf of its scheduler; without a site, the Slurm that this login node belongs to."""
    return (CLUSTER, None) if site is None else (site.scheduler, site.slurm_conf)


def find_foreign(job_ids: Collection[str], known: Collection[Entry] = (), *, site: str | None = None) -> list[Entry]:
    """My jobs with these ids, as the scheduler of ``site`` has them: queued, running or ended.

    An id of a job of ``known`` is looked for in the queue alone, where another job may have it.

    Raises SchedulerError: it does not answer.
    """
    where = site_asked(site)
    kind, conf = scheduler_of(where)
    if not find_kind(kind).takes_sbatch_options or not job_ids:
        return []
    taken = {entry.job_id for entry in known}
    here = [entry for entry in known if (entry.scheduler, entry.cluster) == (kind, own_cluster(kind, conf))]
    if not (to_find := {*job_ids} - (taken - {entry.job_id for entry in here})):
        return []
    scheduler = connect(kind, conf)
    parents = set(map(parent_id, to_find))
    records = without_known((r for r in scheduler.queue() if parent_id(r.job_id) in parents), here)
    in_full = {record.job_id for record in records if "_" not in record.job_id}  # tasks of an array leave one by one
    if rest := sorted(to_find - taken - in_full):
        remembered = [record for record in scheduler.show_jobs(rest) if record.user == user_name()]
        # The live row of an array task or a component has no name in its first seconds, and its SLURM_JOB_ID.
        history = scheduler.history(user_name(), job_ids=rest)
        records += remembered + [record for record in history if record.name is not None or record.state.ended]
    return make_entries((r for r in records if parent_id(r.job_id) in parents), where, components=to_find)


def find_full_ids(numbers: Collection[str], *, site: str | None = None) -> dict[str, str]:
    """What Slurm calls my array tasks and components whose own ids are ``numbers``: ``204`` -> ``200_3``.

    SLURM_JOB_ID is such an id. Raises SchedulerError: the scheduler of ``site`` does not answer.
    """
    kind, conf = scheduler_of(site_asked(site))
    if not find_kind(kind).takes_sbatch_options or not numbers:
        return {}
    scheduler = connect(kind, conf)
    return {number: full for number in numbers if (full := scheduler.full_id(number, user_name())) is not None}


def find_foreign_by_name(names: Collection[str], known: Iterable[Entry], *, site: str | None = None) -> list[Entry]:
    """My jobs of these names that are none of ``known``: queued, running, or ended within `FORGOTTEN_S`.

    Raises SchedulerError: the scheduler does not answer.
    """
    where = site_asked(site)
    kind, conf = scheduler_of(where)
    if not find_kind(kind).takes_sbatch_options or not names:
        return []
    scheduler = connect(kind, conf)
    records = [record for record in scheduler.queue() if record.name in names]
    if missing := {*names} - {record.name for record in records}:
        ended = scheduler.history(user_name(), since=time.time() - FORGOTTEN_S)
        records += [record for record in ended if record.name in missing]
    return make_entries(without_known(records, known), where)


def find_ended(known: Iterable[Entry], *, since: float, site: str | None = None) -> list[JobRecord]:
    """My jobs that ended after ``since`` (seconds since 1970) and are none of ``known``: one sacct.

    Raises SchedulerError: neither the accounting nor the controller answers.
    """
    kind, conf = scheduler_of(site_asked(site))
    if not find_kind(kind).takes_sbatch_options:
        return []
    ended = [record for record in connect(kind, conf).history(user_name(), since=since) if record.state.ended]
    return without_known(ended, known)


def without_known(records: Iterable[JobRecord], known: Iterable[Entry]) -> list[JobRecord]:
    """Records that belong to no job of ``known``."""
    unknown = list(records)
    ids, names = {parent_id(record.job_id) for record in unknown}, {record.name for record in unknown}
    by_id: dict[str, list[Entry]] = {}
    carried_on = set()
    for entry in known:
        # The run folder shows whether another job continues this one. Entries of other ids and names are skipped.
        if (entry.job_id in ids or entry.name in names) and is_reachable(entry):
            by_id.setdefault(current := current_id(entry), []).append(entry)
            carried_on |= {entry.job_id} - {current}
    return [
        record
        for record in unknown
        for job_id in (parent_id(record.job_id),)
        if job_id not in carried_on and not any(is_ours(entry, record) for entry in by_id.get(job_id, []))
    ]


def make_entries(records: Iterable[JobRecord], site: Site | None, *, components: Collection[str] = ()) -> list[Entry]:
    """Make an entry for each job of ``records``, oldest first; empty for a local queue, which lists its jobs itself.

    ``components`` (``12+1``) of heterogeneous jobs have entries of their own.
    """
    kind, conf = scheduler_of(site)
    if not find_kind(kind).takes_sbatch_options:
        return []
    jobs: dict[tuple[int, str], list[JobRecord]] = {}
    for number, job in enumerate(by_job(records)):
        for record in job:
            job_id = record.job_id if record.job_id in components else parent_id(record.job_id)
            jobs.setdefault((number, job_id), []).append(record)
    cluster = own_cluster(kind, conf) if jobs else None
    entries = []
    for (_, job_id), own in jobs.items():
        tasks = {int(task) for r in own for _, bar, task in (t.partition("_") for t in task_ids(r.job_id)) if bar}
        entries.append(
            Entry(
                job_id,
                own[0].name or job_id,
                "-" if site is None else site.name,
                kind,
                f"{NO_FOLDER}/{job_id}",
                first_submitted(own),
                cluster,
                conf,
                array_text(sorted(tasks)) if tasks else None,
                user=user_name(),
            )
        )
    return sorted(entries, key=lambda entry: entry.submitted)


def was_pruned(entry: Entry) -> bool:
    """Whether hpcjobs submitted the job, of which only the scheduler still knows: `prune` removed its run folder."""
    return entry.is_foreign and any(
        (one.job_id, one.name) == (entry.job_id, entry.name)
        and is_reachable(one)
        and entry.submitted >= one.submitted - CLOCK_TOLERANCE_S  # a requeue moves it
        for one in index.read().removed
    )


def log_files(entry: Entry) -> list[Path]:
    """The files that the job, or each task of its array, prints to; of a job that Slurm has forgotten the default."""
    return [log_file(job_id, entry.slurm_conf) for job_id in own_ids(entry)]


def log_file(job_id: str, conf: str | None) -> Path:
    """The file that this job, component or array task, submitted by other means, prints to."""
    path = _file_of_slurm(job_id, conf) or Path(f"slurm-{job_id}.out").absolute()
    if "+" in job_id and not os.path.exists(path):  # the first component runs the batch script
        return log_file(parent_id(job_id), conf)
    return path


@cache
def _file_of_slurm(job_id: str, conf: str | None) -> Path | None:
    """Asked once in a command: no job changes its files. None: Slurm has forgotten the job."""
    return output_file(connect(CLUSTER, conf), job_id)


RECENT_S = 86_400.0
"""Jobs submitted within this time are listed even if they have ended."""


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
    """Jobs with their entries, jobs submitted by other means, and errors of schedulers."""

    known: list[Known]
    others: list[JobRecord]
    errors: list[SchedulerError]
    no_queue: SchedulerError | None = None
    """Why it is not known what waits and runs at the site."""


def survey(*, since: float, site: str | None = None, connect: ConnectQueue = connect) -> Survey:
    """My jobs submitted since ``since`` (seconds since 1970) and older ones that have not ended.

    Jobs without a run folder that no scheduler knows are left out. One queue query per scheduler, and one accounting
    query for jobs that ended since the last look. A scheduler
    that does not answer does not hide the jobs of the others.
    """
    schedulers: dict[tuple[str, str | None], QueueReadOnce] = {}

    def once(kind: str, conf: str | None) -> JobQueue:
        if (kind, conf) not in schedulers:
            schedulers[kind, conf] = QueueReadOnce(connect(kind, conf))
        return schedulers[kind, conf]

    where = site_asked(site)
    kind, conf = scheduler_of(where)
    errors: list[SchedulerError] = []
    no_queue = None
    before = read_index()  # the queue after it: a job that is submitted meanwhile would be missing from its queue
    try:
        queue = once(kind, conf).queue()
    except SchedulerError as error:
        queue, errors, no_queue = [], [error], error
    # A job of the queue that is in no list was submitted meanwhile, or by other means.
    jobs = read_index() if without_known(queue, before.entries) else before
    listed_before, queued = {entry.run_dir for entry in before.entries}, {parent_id(record.job_id) for record in queue}
    # Closed jobs may be in the queue again, requeued by hand.
    mine = [
        entry
        for entry in jobs.entries
        if entry.job_id in queued
        or (entry.run_dir in listed_before and (entry.submitted >= since or jobs.is_open(entry)))
    ]
    known = statuses(
        [e for e in mine if site is None or where is None or e.site == where.name], connect=once, errors=errors
    )
    index.close(job.entry for job in known if job.entry.submitted < since and _is_over(job))
    listed = [Known(job.entry, records) for job in known if (records := _select_records(job))]
    return Survey(listed, without_known(queue, mine), list(dict.fromkeys(errors)), no_queue)


def select_unfinished(*, site: str | None = None) -> tuple[list[Entry], SchedulerError | None]:
    """My jobs that have not ended, oldest first: also requeued ones, ones without a run folder, and ones submitted by
    other means; and why the site's queue did not answer, where only jobs are known that have not ended as they wrote.

    Raises SchedulerError: none is known, and a scheduler does not answer.
    """
    known, others, errors, no_queue = survey(since=time.time() - RECENT_S, site=site)
    if not known and errors and not isinstance(errors[0], CommandMissingError):
        raise errors[0]
    if isinstance(no_queue, CommandMissingError):
        no_queue = None
    own = [job.entry for job in known if is_reachable(job.entry) and not all(r.state.ended for r in job.records)]
    return own + make_entries(others, site_asked(site)), no_queue


def listing(
    *, since: float, site: str | None = None, ended_elsewhere: bool = False, connect: Connect = connect
) -> Listing:
    """The rows of a `survey`; ``ended_elsewhere``: also jobs submitted by other means that ended, by one sacct more."""
    known, others, errors, _ = survey(since=since, site=site, connect=connect)
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
    """The records to list; without a run folder, unknown records are left out."""
    if os.path.lexists(job.entry.run_dir):
        return job.records
    return [record for record in job.records if record.state is not State.UNKNOWN]


def _is_over(job: Known) -> bool:
    """Whether the job needs no further look."""
    unknown = all(record.state is State.UNKNOWN for record in job.records)
    return is_closed(job.entry) or (unknown and time.time() - job.entry.submitted > FORGOTTEN_S)
