"""Removing run folders and index entries of old jobs; never of one that waits or runs, or may do so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.errors import HpcJobsWarning, reason_of
from hpcjobs.record.names import MANIFEST, SUBMITTED
from hpcjobs.run import index
from hpcjobs.run.accounting_file import may_be_requeued, read_accounting
from hpcjobs.run.identity import is_reachable, user_name
from hpcjobs.run.index import Entry
from hpcjobs.run.listing import FORGOTTEN_S
from hpcjobs.run.select import entries_of
from hpcjobs.run.state_file import read_json
from hpcjobs.run.status import Connect, statuses
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.local.client import LocalScheduler


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
    """Jobs that wait, run, whose end is not known, or whose folder a job uses."""


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
    known = statuses(mine, connect=connect)
    in_use = _folders_in_use(entries_of(None), connect)
    chosen: list[Old] = []
    left = 0
    for entry, records in known:
        is_over = _is_over(entry, records)
        if not os.path.lexists(entry.run_dir):
            # It may run without its folder, or lie on a file system that is not mounted here and now.
            if not is_over or not os.path.isdir(os.path.dirname(entry.run_dir)):
                left += 1
            elif not states and not min_size:
                chosen.append(Old(entry, (), entry.submitted, 0))
            continue
        if not is_over or not _is_run_folder(entry) or any(Path(entry.run_dir) in path.parents for path in in_use):
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
    """Ended, and not to start again; of another cluster's job that can be known a day after its end.

    A job that its scheduler has forgotten, and that wrote no end, has ended where it is old enough.
    """
    if all(record.state is State.UNKNOWN for record in records):
        return time.time() - entry.submitted > FORGOTTEN_S
    if not all(record.state.ended for record in records):
        return False
    return is_reachable(entry) or not may_be_requeued(entry, records)


class _JobChdir(msgspec.Struct):
    chdir: str


class _JobFolder(msgspec.Struct):
    job: _JobChdir


def _folders_in_use(entries: Iterable[Entry], connect: Connect) -> list[Path]:
    """The working folders of jobs that have not ended: a rerun of a snapshot begins in the run folder of the first."""
    candidates = [entry for entry in entries if read_accounting(entry) is None]
    alive = [job.entry for job in statuses(candidates, connect=connect, errors=[]) if not _is_over(*job)]
    manifests = (read_json(Path(entry.run_dir) / MANIFEST, _JobFolder) for entry in alive)
    return [Path(manifest.job.chdir) for manifest in manifests if manifest is not None]


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
    """Remove run folders and entries, and return what is removed. What cannot be is a warning, and stays listed.

    With jobs of this machine go the files of its queue.
    """
    removed = [job for job in jobs if _remove_folder(job.entry.run_dir)]
    index.remove(job.entry for job in removed)
    local = [job.entry for job in removed if job.entry.scheduler == "local" and is_reachable(job.entry)]
    LocalScheduler().forget(entry.job_id for entry in local)
    return removed


def _remove_folder(run_dir: str) -> bool:
    """Renamed first: what cannot be removed stays as it was, and what is removed is never seen half empty."""
    if not os.path.lexists(run_dir):
        return True
    parent, name = os.path.split(run_dir)
    leaving = os.path.join(parent, f".{name}.removed")
    try:
        for folder, _, _ in os.walk(run_dir):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        os.rename(run_dir, leaving)
        shutil.rmtree(leaving)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        rest = "" if os.path.lexists(run_dir) else f"; its rest is {leaving}"
        warnings.warn(
            f"run folder {run_dir} cannot be removed: {reason_of(error)}{where}{rest}", HpcJobsWarning, stacklevel=3
        )
    return not os.path.lexists(run_dir)
