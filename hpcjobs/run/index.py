"""The index of submitted jobs: one log per host in the user's state folder, a line per job.

A host appends to its own log alone, a line in one write, so nothing has to be locked: locks are what network file
systems lack or lose. A second kind of line marks a job as closed, so that later commands need not look at its run
folder. Nothing is ever rewritten: 10,000 jobs are 4 MB, read and parsed in some 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import append_lines, state_dir
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
    return state_dir() / "jobs"


def add(entry: Entry) -> None:
    """Remember ``entry``.

    Raises:
        OSError: the state folder cannot be written.
    """
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
    """All logs. A line that cannot be used is skipped, with a warning that names it."""
    jobs: dict[tuple[str, str], Entry] = {}
    closed: set[tuple[str, str]] = set()
    removed: set[tuple[str, str]] = set()
    for path in _paths(".jsonl"):
        for number, line in enumerate((_content(path) or b"").split(b"\n"), 1):
            if line.startswith(b'{"closed":'):
                if (mark := _decode(_CLOSED, line, f"{path}, line {number}")) is not None:
                    closed.add((mark.closed, mark.job_id))
            elif line.startswith(b'{"removed":'):
                if (no_more := _decode(_REMOVED, line, f"{path}, line {number}")) is not None:
                    removed.add((no_more.removed, no_more.job_id))
            elif line and (entry := _decode(_ENTRY, line, f"{path}, line {number}")) is not None:
                jobs[entry.run_dir, entry.job_id] = entry
    for entry in _import_single_files():
        jobs.setdefault((entry.run_dir, entry.job_id), entry)
    no_more_listed = [jobs.pop(key) for key in removed & jobs.keys()]
    return Index(sorted(jobs.values(), key=lambda entry: entry.submitted), frozenset(closed), no_more_listed)


def _append(lines: list[bytes]) -> None:
    folder = index_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_lines(folder / f"{os.uname().nodename}.jsonl", (line.decode() for line in lines))


def _paths(suffix: str) -> list[Path]:
    folder = index_dir()
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix) and name[0] != ".")
    except FileNotFoundError:
        return []
    except OSError as error:
        warnings.warn(f"the list of jobs {folder} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=3)
        return []


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {error.strerror}; its jobs are left out", HpcJobsWarning, stacklevel=3)
        return None


def _decode(decoder: msgspec.json.Decoder[T], line: bytes, where: str) -> T | None:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        warnings.warn(f"{where}: no record of a job, skipped: {error}", HpcJobsWarning, stacklevel=3)
        return None


def _import_single_files() -> list[Entry]:
    """The records of an older hpcjobs, a file per job: moved into this host's log."""
    imported = {}
    for path in _paths(".json"):
        content = _content(path)
        if content is not None and (entry := _decode(_ENTRY, content, str(path))) is not None:
            imported[path] = entry
    if imported:
        with contextlib.suppress(OSError):  # a read-only folder keeps the files
            _append([msgspec.json.encode(entry) for entry in imported.values()])
            for path in imported:
                path.unlink(missing_ok=True)
    return list(imported.values())
