"""Who knows what became of jobs, asked in this order: sacct; squeue and scontrol; the jobs' own files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import polars as pl

from hpcjobs.accounting.derive import derive, merge_attempts
from hpcjobs.accounting.doubts import Doubt, Doubts
from hpcjobs.accounting.goodput import with_checkpoints
from hpcjobs.accounting.gpu_monitor import with_monitor
from hpcjobs.accounting.job_records import as_frame
from hpcjobs.accounting.query import Question, Sacct
from hpcjobs.accounting.sstat import with_running
from hpcjobs.errors import SchedulerError
from hpcjobs.job.array import task_ids
from hpcjobs.processes.programs import run
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import own_records
from hpcjobs.run.status import statuses
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.scheduler.slurm.client import Slurm
from hpcjobs.scheduler.slurm.parse import parse_scontrol
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.user import user_name


class Wanted(NamedTuple):
    """Which jobs a report is about. None: not restricted."""

    since: float
    """Jobs that ended since then (seconds since 1970), and those that have not ended."""
    until: float | None = None
    users: tuple[str, ...] | None = None
    account: str | None = None
    states: tuple[str, ...] | None = None
    name: str | None = None
    """Shell pattern over job names."""
    job_ids: tuple[str, ...] | None = None
    """These jobs, whenever they ran."""


class Gathered(NamedTuple):
    """Jobs (one row each, `columns.COLUMNS`), what is doubtful, and why a better source was not used."""

    jobs: pl.DataFrame
    doubts: list[Doubt]
    notes: list[str]


def me() -> str:
    """The user's name."""
    return user_name()


def gather(wanted: Wanted, *, site: str | Site | None = None) -> Gathered:
    """The jobs of one site, one row each.

    Raises:
        ConfigError: no such site. SchedulerError: nobody at all answers.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    doubts, notes = Doubts(), list[str]()
    if where.scheduler == "local":
        jobs = derive(_local(wanted, where), where, source="local")
    else:
        try:
            jobs = pl.concat(list(chunks(wanted, where, doubts)))
        except SchedulerError as error:
            said = error.message.splitlines()[0]
            notes.append(f"no accounting by sacct ({said}); jobs as the queue and their own files tell")
            jobs = derive(_without_sacct(wanted, where, notes), where)
    own = {entry.job_id: entry.run_dir for entry in index.entries() if entry.site == where.name}
    parent = pl.col("job_id").str.extract(r"^([^_+]+)")
    folder = parent.replace_strict(own, default=None, return_dtype=pl.String)
    jobs = restricted(merge_attempts(jobs), wanted).with_columns(run_dir=pl.coalesce("run_dir", folder))
    return Gathered(with_monitor(with_checkpoints(jobs), where), doubts.by_frequency(), notes)


def chunks(wanted: Wanted, site: Site, doubts: Doubts) -> Iterator[pl.DataFrame]:
    """Attempts by sacct, a day at a time: for sums over more jobs than fit into memory.

    Raises:
        SchedulerError: sacct does not answer.
    """
    until = time.time() if wanted.until is None else wanted.until
    conf = site.slurm_conf
    cluster = os.environ.get("SLURM_CLUSTERS") or None  # which squeue and sbatch heed and sacct does not
    sacct = Sacct(Question(site.name, wanted.since, until, wanted.users, conf, cluster))
    frames = (
        sacct.attempts(doubts) if wanted.job_ids is None else sacct.of_jobs(sorted(_parents(wanted.job_ids)), doubts)
    )
    for frame in frames:
        yield derive(with_running(frame, slurm_conf=conf), site)


def _local(wanted: Wanted, site: Site) -> pl.DataFrame:
    entries = [entry for entry in index.entries() if entry.scheduler == "local"]
    return as_frame(_own(_picked(entries, wanted)), site)


def _own(entries: list[Entry]) -> Iterator[tuple[JobRecord, Entry]]:
    for known in statuses(entries):
        for record in known.records:
            yield record, known.entry


def _picked(entries: list[Entry], wanted: Wanted) -> list[Entry]:
    if wanted.job_ids is None:
        return entries
    ids = _parents(wanted.job_ids)
    return [entry for entry in entries if entry.job_id in ids]


def _without_sacct(wanted: Wanted, site: Site, notes: list[str]) -> pl.DataFrame:
    """squeue for what lives, scontrol for what ended lately, then the files of jobs submitted with hpcjobs."""
    known = {entry.job_id: entry for entry in index.entries() if entry.site == site.name}
    slurm = Slurm(site.slurm_conf)
    found: dict[str, tuple[JobRecord, Entry | None]] = {}
    try:
        for record in [*slurm.queue(), *_remembered(site)]:
            found.setdefault(record.job_id, (record, known.get(record.job_id.split("_")[0])))
    except SchedulerError as error:
        notes.append(f"the queue does not answer either ({error.message.splitlines()[0]})")
        if not known:
            raise
    seen = {job_id.split("_")[0] for job_id in found}
    for entry in _picked([entry for entry in known.values() if entry.job_id not in seen], wanted):
        for record in own_records(entry):
            found.setdefault(record.job_id, (record, entry))
    mine = pl.col("user").is_null() & (
        pl.col("source") == "squeue"
    )  # squeue was asked for mine; scontrol tells nobody's
    return as_frame(found.values(), site).with_columns(user=pl.when(mine).then(pl.lit(me())).otherwise("user"))


def _remembered(site: Site) -> list[JobRecord]:
    """Everybody's jobs that slurmctld still knows: until some minutes after their end."""
    env = {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CONF": site.slurm_conf} if site.slurm_conf else {})
    answer = run(["scontrol", "--oneliner", "show", "job"], env=env)
    if answer.code != 0:
        raise SchedulerError(f"scontrol refused (exit code {answer.code}): {answer.err.strip()}")
    return parse_scontrol(answer.out)


def restricted(jobs: pl.DataFrame, wanted: Wanted) -> pl.DataFrame:
    """Those of ``jobs`` that are wanted."""
    keep = pl.lit(True)
    if wanted.job_ids is None:
        keep = pl.col("ended").is_null() | (pl.col("ended") >= int(wanted.since))
        if wanted.until is not None:
            keep &= pl.col("submitted") < int(wanted.until)
    else:
        asked = set(wanted.job_ids)
        keep &= pl.col("job_id").is_in([job_id for job_id in jobs["job_id"] if _is_asked(job_id, asked)])
    if wanted.users is not None:
        keep &= pl.col("user").is_in(wanted.users)
    if wanted.account is not None:
        keep &= pl.col("account") == wanted.account
    if wanted.states is not None:
        keep &= pl.col("state").is_in([state.upper() for state in wanted.states])
    if wanted.name is not None:
        names = jobs["name"].unique().drop_nulls().to_list()
        keep &= pl.col("name").is_in([name for name in names if fnmatchcase(name, wanted.name)])
    return jobs.filter(keep)


def _parents(job_ids: Iterable[str]) -> set[str]:
    """``123`` of ``123``, ``123_4``, ``123_[5-9]`` and ``123+1``."""
    return {re.split(r"[_+]", job_id)[0] for job_id in job_ids}


def _is_asked(job_id: str, asked: set[str]) -> bool:
    """The id itself is among ``asked``, or its job, or one of the pending tasks that it stands for."""
    return not asked.isdisjoint({job_id, *_parents([job_id]), *task_ids(job_id)})
