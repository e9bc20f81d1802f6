"""Removing run folders and index entries of old jobs; never of one that runs, or that is not accounted for."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import HpcJobsWarning, reason_of
from hpcjobs.run import index
from hpcjobs.run.accounting_file import may_be_requeued, read_accounting
from hpcjobs.run.folder import SUBMITTED
from hpcjobs.run.identity import is_reachable, user_name
from hpcjobs.run.index import Entry
from hpcjobs.run.select import entries_of
from hpcjobs.run.state_file import read_json
from hpcjobs.run.status import Connect, statuses
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.connect import connect


class Old(NamedTuple):
    """A job whose records can be removed."""

    entry: Entry
    states: tuple[State, ...]
    """How its tasks ended; empty: its run folder was removed before."""
    ended: float
    """Seconds since 1970; the submission where the end is not known."""
    size: int
    """Bytes of its run folder."""


class Choice(NamedTuple):
    """What can be removed, and how many jobs of that age cannot."""

    old: list[Old]
    left: int
    """Jobs that run, wait, or are not accounted for."""


def select_old(
    *,
    age_s: float,
    states: Collection[State] = (),
    min_size: int = 0,
    site: str | None = None,
    connect: Connect = connect,
) -> Choice:
    """Jobs that ended at least ``age_s`` seconds ago, in one of ``states``, with at least ``min_size`` bytes.

    Raises:
        SchedulerError: whether a job was started again is not known.
    """
    before = time.time() - age_s
    mine = [entry for entry in entries_of(site) if entry.submitted <= before and entry.user in (None, user_name())]
    accounted = [entry for entry in mine if read_accounting(entry) is not None]
    known = {id(job.entry): job.records for job in statuses(accounted, connect=connect)}
    chosen: list[Old] = []
    left = 0
    for entry in mine:
        if not os.path.lexists(entry.run_dir):
            if not os.path.isdir(os.path.dirname(entry.run_dir)):  # a file system that is not mounted here and now?
                left += 1
            elif not states and not min_size:
                chosen.append(Old(entry, (), entry.submitted, 0))
            continue
        records = known.get(id(entry), [])
        if not _is_over(entry, records) or not _is_run_folder(entry):
            left += 1
            continue
        ended = max((record.ended for record in records if record.ended is not None), default=entry.submitted)
        ends = tuple(dict.fromkeys(record.state for record in records))
        if ended > before or (states and not set(ends) <= set(states)):
            continue
        if (size := sum(_sizes(entry.run_dir))) >= min_size:
            chosen.append(Old(entry, ends, ended, size))
    return Choice(chosen, left)


def _is_over(entry: Entry, records: list[JobRecord]) -> bool:
    """Accounted for, and not to start again; of another cluster's job that can be known a day after its end."""
    if not records or not all(record.state.ended for record in records):
        return False
    return is_reachable(entry) or not may_be_requeued(entry, records)


def _is_run_folder(entry: Entry) -> bool:
    """Whether the folder says itself that it is this job's: nothing else is ever removed."""
    own = read_json(Path(entry.run_dir) / SUBMITTED, Entry)
    of_sweep = Path(entry.run_dir).parent.parent / "sweep.json"  # whose results need it
    is_its_own = own is not None and own.job_id == entry.job_id and not os.path.islink(entry.run_dir)
    return is_its_own and not of_sweep.exists()


def _sizes(folder: str) -> Iterator[int]:
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # it is being removed, or not ours to see
                yield os.lstat(os.path.join(parent, name)).st_size


def remove(jobs: Iterable[Old]) -> list[Old]:
    """Remove run folders and entries, and return what is removed. What cannot be is a warning, and stays listed."""
    removed = [job for job in jobs if _remove_folder(job.entry.run_dir)]
    index.remove(job.entry for job in removed)
    return removed


def _remove_folder(run_dir: str) -> bool:
    try:
        if os.path.lexists(run_dir):
            shutil.rmtree(run_dir)
    except OSError as error:
        warnings.warn(f"run folder {run_dir} cannot be removed: {reason_of(error)}", HpcJobsWarning, stacklevel=3)
        return False
    return True
