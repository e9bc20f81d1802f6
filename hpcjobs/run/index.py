"""The index of submitted jobs: a store with a line per job.

A second kind of line marks a job as closed, so that later commands need not look at its run folder. 10,000 jobs are
4 MB, read and parsed in some 20 ms.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import AppendStore, StoredLine
from hpcjobs.scheduler_kind import SchedulerKind, find_kind
from hpcjobs.site.checks import Moment

T = TypeVar("T")
NO_FOLDER = "/dev/null"
"""Parent of the run folders of jobs submitted by other means: such a folder cannot exist."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A submitted job: how to find it again and whom to ask about it. Fields of a newer hpcjobs are left out."""

    job_id: str
    name: str
    site: str
    scheduler: str
    run_dir: str
    submitted: Moment
    """Seconds since 1970."""
    cluster: str | None = None
    """Slurm's ClusterName, or the name of the host for a local job; None: not known."""
    slurm_conf: str | None = None
    array: str | None = None
    """The array specification; None: a plain job."""
    task: int | None = None
    """Only this task of the array is meant; never set in the index itself."""
    user: str | None = None
    """Who submitted it; None: not known."""

    @property
    def named_id(self) -> str:
        """The id by which a user names it: ``123``, and ``123_4`` where only that task is meant."""
        return self.job_id if self.task is None else f"{self.job_id}_{self.task}"

    @property
    def is_foreign(self) -> bool:
        """Whether the job was submitted by other means, and has no run folder."""
        return self.run_dir.startswith(f"{NO_FOLDER}/")

    @property
    def kind(self) -> SchedulerKind:
        """The scheduler's properties."""
        return find_kind(self.scheduler)


class _Closed(msgspec.Struct, frozen=True):
    """A line that says: this job is accounted for, or its run folder was removed."""

    closed: str
    """The run folder."""
    job_id: str


class _Removed(msgspec.Struct, frozen=True):
    """A line that says: this job is listed no more."""

    removed: str
    """The run folder."""
    job_id: str


_ENTRY, _CLOSED = msgspec.json.Decoder(Entry), msgspec.json.Decoder(_Closed)
_REMOVED = msgspec.json.Decoder(_Removed)


class Index(NamedTuple):
    """Every job, with marks of closed and removed ones."""

    entries: list[Entry]
    """Oldest first."""
    closed: frozenset[tuple[str, str]]
    removed: list[Entry]
    """Jobs that are listed no more."""

    def is_open(self, entry: Entry) -> bool:
        """Not marked as closed."""
        return (entry.run_dir, entry.job_id) not in self.closed


def index_dir() -> Path:
    """``$XDG_STATE_HOME/hpcjobs/jobs``."""
    return _store().folder


def add(entry: Entry) -> None:
    """Remember ``entry``. Raises OSError: the state folder cannot be written."""
    _append([msgspec.json.encode(entry)])


def close(entries: Iterable[Entry]) -> None:
    """Mark jobs as closed. A state folder that cannot be written only costs the next command the same look again."""
    lines = [msgspec.json.encode(_Closed(entry.run_dir, entry.job_id)) for entry in entries]
    if lines:
        with contextlib.suppress(OSError):
            _append(lines)


def remove(entries: Iterable[Entry]) -> None:
    """List jobs no more. A state folder that cannot be written leaves them, without their folders, to the next time."""
    lines = [msgspec.json.encode(_Removed(entry.run_dir, entry.job_id)) for entry in entries]
    if lines:
        with contextlib.suppress(OSError):
            _append(lines)


def entries() -> list[Entry]:
    """Every job, oldest first."""
    return read().entries


def read() -> Index:
    """Read all logs; a line or log that cannot be used is skipped, with a warning that names it."""
    jobs: dict[tuple[str, str], Entry] = {}
    closed: set[tuple[str, str]] = set()
    removed: set[tuple[str, str]] = set()
    for line in _store().read(_warn_unreadable):
        if line.text.startswith(b'{"closed":'):
            if (mark := _decode(_CLOSED, line)) is not None:
                closed.add((mark.closed, mark.job_id))
        elif line.text.startswith(b'{"removed":'):
            if (no_more := _decode(_REMOVED, line)) is not None:
                removed.add((no_more.removed, no_more.job_id))
        elif (entry := _decode(_ENTRY, line)) is not None:
            jobs[entry.run_dir, entry.job_id] = entry
    no_more_listed = [jobs.pop(key) for key in removed & jobs.keys()]
    return Index(sorted(jobs.values(), key=lambda entry: entry.submitted), frozenset(closed), no_more_listed)


def _store() -> AppendStore:
    return AppendStore("jobs")


def _append(lines: list[bytes]) -> None:
    _store().append(line.decode() for line in lines)


def _warn_unreadable(error: OSError) -> None:
    text = f"the list of jobs {error.filename} cannot be read: {error.strerror}"
    warnings.warn(text, HpcJobsWarning, stacklevel=4)


def _decode(decoder: msgspec.json.Decoder[T], line: StoredLine) -> T | None:
    try:
        return decoder.decode(line.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        warnings.warn(f"{line}: no record of a job, skipped: {error}", HpcJobsWarning, stacklevel=3)
        return None
