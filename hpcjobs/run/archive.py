"""Archives and removes run folders of jobs that have ended."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
import tarfile
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs import __version__
from hpcjobs.errors import HpcJobsWarning, RequestError, SchedulerError, reason_of
from hpcjobs.files import file_name, open_regular, raise_error, user_name
from hpcjobs.guards import refuse_change
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    FINAL_AFTER_S,
    FORGOTTEN_S,
    may_be_requeued,
    read_accounting,
    read_request,
    read_submitted,
)
from hpcjobs.run.select import entries_of
from hpcjobs.run.status import NOT_ACCOUNTED, RUNAWAY, Connect, is_in_queue, is_reachable, statuses, where_asked
from hpcjobs.scheduler.base import JobRecord, State, connect

_MODES = {".tar": "w", ".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}
SUMS, ABOUT = "SHA256SUMS", "ARCHIVE.json"


class Archive(NamedTuple):
    """The archive that was written."""

    path: Path
    files: int
    size: int
    """Bytes of the tar file."""


class _Summed(io.RawIOBase):
    """A file that sums its content while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


def archive(entry: Entry, path: Path | None = None, *, connect: Connect = connect) -> Archive:
    """Write the tar file (``.gz`` and ``.xz`` compress it); default ``NAME_ID.tar`` in the current folder.

    ``sha256sum -c SHA256SUMS`` checks it once it is unpacked.

    Raises RequestError: the job has not ended, its folder is not there, or a file cannot be read or written.
    """
    run_dir = Path(entry.run_dir)
    if not os.path.isdir(run_dir):
        raise RequestError(f"job {entry.job_id} has no run folder any more: {run_dir}")
    entry = replace(entry, task=None)  # all tasks share the folder
    (known,) = statuses([entry], connect=connect)
    if any(not record.state.ended for record in known.records):
        states = ", ".join(dict.fromkeys(record.state.value for record in known.records))
        raise RequestError(f"job {entry.job_id} is {states}: its files still change", hint="hpcjobs wait, then archive")
    if _may_be_ending(entry, known.records) and is_in_queue(entry, connect=connect):
        hint = "archive it once squeue no longer lists it"
        raise RequestError(f"Slurm still ends job {entry.job_id}: its files still change", hint=hint)
    target = path or Path(f"{file_name(entry.name)}_{entry.job_id}.tar")
    exists = RequestError(f"{target} exists already", hint="--output names another file")
    if target.exists():
        raise exists
    if run_dir.resolve() in target.absolute().resolve().parents:
        raise RequestError(f"{target} would lie in the run folder itself", hint="--output names another place")
    if (mode := _MODES.get(target.suffix)) is None:
        raise RequestError(f"{target}: an archive is a tar file", hint=f"a name that ends in {', '.join(_MODES)}")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    about = {
        "schema": 1, "hpcjobs": __version__, "created": time.time(), "entry": entry, "records": known.records,
        "run_dir": str(run_dir),
    }  # fmt: skip
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # as private as the run folder
        with os.fdopen(descriptor, "wb") as file:
            count = _write(file, run_dir, msgspec.json.format(msgspec.json.encode(about), indent=2), mode)
        if target.exists():  # made by another command meanwhile
            raise exists
        os.replace(partial, target)
    except OSError as error:
        raise RequestError(f"{error.filename or target}: {reason_of(error)}: no archive was written") from error
    finally:
        partial.unlink(missing_ok=True)
    return Archive(target, count, target.stat().st_size)


def _may_be_ending(entry: Entry, records: list[JobRecord]) -> bool:
    """Whether its programs may still run: Slurm allows them KillWait, and accounts for the end before."""
    by_signal = [record for record in records if record.state not in (State.COMPLETED, State.FAILED)]
    is_recent = time.time() - max((record.ended or 0 for record in by_signal), default=0) < FINAL_AFTER_S
    return entry.kind.has_nodes and is_recent and is_reachable(entry)


def _write(file: IO[bytes], run_dir: Path, about: bytes, mode: str) -> int:
    """Fill the tar; the number of the job's files."""
    sums = [f"{hashlib.sha256(about).hexdigest()}  {ABOUT}\n"]
    with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        _add_text(tar, ABOUT, about)
        for path, folder in _paths(run_dir):
            name = str(Path(run_dir.name, path.relative_to(run_dir)))
            member = tar.gettarinfo(path, arcname=name)
            if not (member.isreg() or member.islnk()):
                tar.addfile(member)
                continue
            member.type, member.linkname = tarfile.REGTYPE, ""  # hard links become files
            with open_regular(path, folder=folder) as content:
                member.size = os.fstat(content.fileno()).st_size
                summed = _Summed(content)
                tar.addfile(member, summed)
            # As sha256sum prints and reads such names.
            escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            mark = "" if escaped == name else "\\"
            sums.append(f"{mark}{summed.sum.hexdigest()}  {escaped}\n")
        _add_text(tar, SUMS, "".join(sums).encode("utf-8", "surrogateescape"))
    return len(sums) - 1


def _paths(run_dir: Path) -> Iterator[tuple[Path, int | None]]:
    """The folder, and files, folders and links in it, in order, each with the open folder that it is in.

    Sockets and pipes of a server are left out.
    """
    yield run_dir, None
    for parent, folders, files, descriptor in os.fwalk(run_dir, onerror=raise_error):
        folders.sort()
        for name in sorted((*files, *folders)):
            path = Path(parent, name)
            if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                yield path, descriptor


def _add_text(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
    tar.addfile(member, io.BytesIO(content))


class Old(NamedTuple):
    """An ended job with removable records."""

    entry: Entry
    states: tuple[State, ...]
    """How its tasks ended; empty: its run folder was removed before."""
    ended: float
    """Seconds since 1970; the submission where the end is not known."""
    size: int
    """Bytes of its run folder."""


class Choice(NamedTuple):
    """Removable jobs, and the number of other jobs of that age."""

    old: list[Old]
    left: int
    """Jobs that wait or run, have an unknown end, or a folder that another job uses."""


def select_old(
    *,
    age_s: float,
    states: Collection[State] = (),
    min_size: int = 0,
    site: str | None = None,
) -> Choice:
    """Jobs that ended at least ``age_s`` seconds ago, in one of ``states``, with at least ``min_size`` bytes.

    Raises SchedulerError: whether a job was started again is not known.
    """
    before = time.time() - age_s
    mine = [entry for entry in entries_of(site) if entry.submitted <= before and entry.user in (None, user_name())]
    known = statuses(mine)
    in_use = _folders_in_use(entries_of(None))
    chosen: list[Old] = []
    left = 0
    for entry, records in known:
        is_over = _is_over(entry, records)
        if not os.path.lexists(entry.run_dir):
            # The job may run without its folder, or the file system is not mounted here.
            if not is_over or not os.path.isdir(os.path.dirname(entry.run_dir)):
                left += 1
            elif not states and not min_size:
                chosen.append(Old(entry, (), entry.submitted, 0))
            continue
        if not is_over or not _is_run_folder(entry) or Path(entry.run_dir) in in_use:
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

    A job, or a task of an array, that its scheduler has forgotten, and that wrote no end, has ended where it is old
    enough. A job may still be ending on its nodes for some minutes after its end, also if the accounting has it.
    """
    if any(record.state is State.UNKNOWN and record.reason in (RUNAWAY, NOT_ACCOUNTED) for record in records):
        return False
    is_forgotten = time.time() - entry.submitted > FORGOTTEN_S
    if all(record.state is State.UNKNOWN for record in records):
        return is_forgotten
    records = [record for record in records if not (is_forgotten and record.state is State.UNKNOWN)]
    if not all(record.state.ended for record in records):
        return False
    if entry.kind.has_nodes and time.time() - max(record.ended or 0 for record in records) < FINAL_AFTER_S:
        return False
    return is_reachable(entry) or not may_be_requeued(entry, records)


def _is_final(entry: Entry, records: list[JobRecord]) -> bool:
    """Whether the end was kept, and so long ago that nobody needs to ask for another start."""
    return read_accounting(entry) is not None and not may_be_requeued(entry, records)


def _folders_in_use(entries: Iterable[Entry]) -> set[Path]:
    """Run and working folders of jobs that have not ended, and those above: a rerun begins in the first one's."""
    alive: list[Entry] = []
    for _, jobs in groupby(sorted(entries, key=where_asked), key=where_asked):
        errors: list[SchedulerError] = []
        known = statuses(jobs, errors=errors)
        # Where it does not answer, a job may wait for another start.
        alive += [job.entry for job in known if not (_is_final(*job) if errors else _is_over(*job))]
    requests = (read_request(entry) for entry in alive)
    used = [Path(entry.run_dir) for entry in alive]
    used += [Path(request.chdir) for request in requests if request is not None and request.chdir is not None]
    return {folder for path in used for folder in (path, *path.parents)}


def _is_run_folder(entry: Entry) -> bool:
    """Whether the folder's own record names this job: only such folders are removed."""
    own = read_submitted(Path(entry.run_dir))
    of_sweep = Path(entry.run_dir).parent.parent / "sweep.json"  # its results need the folder
    is_its_own = own is not None and own.job_id == entry.job_id and not os.path.islink(entry.run_dir)
    return is_its_own and not of_sweep.exists()


def _sizes(folder: str) -> Iterator[int]:
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # it is being removed, or not ours to see
                yield os.lstat(os.path.join(parent, name)).st_size


def remove(jobs: Iterable[Old]) -> list[Old]:
    """Remove run folders and entries; return the removed ones. Others stay listed, with a warning.

    The scheduler may remove its files of the jobs, too.

    Raises RequestError: the environment is read-only.
    """
    refuse_change("remove run folders")
    removed = [job for job in jobs if _remove_folder(job.entry.run_dir)]
    index.remove(job.entry for job in removed)
    here = [job.entry for job in removed if is_reachable(job.entry)]
    for scheduler in sorted({entry.scheduler for entry in here}):
        connect(scheduler).forget([entry.job_id for entry in here if entry.scheduler == scheduler])
    return removed


def _remove_folder(run_dir: str) -> bool:
    """Rename a folder, then remove it: readers never see it half empty, and a failed rename leaves it unchanged.

    A removal that was killed or failed in between left the rest under the other name: it is removed now.
    """
    parent, name = os.path.split(run_dir)
    leaving = os.path.join(parent, f".{name}.removed")
    try:
        if os.path.lexists(run_dir):
            for folder, _, _ in os.walk(run_dir):
                if not os.access(folder, os.W_OK | os.X_OK) and os.path.lexists(folder):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
            with contextlib.suppress(FileNotFoundError):  # another prune removes it at the same time
                os.rename(run_dir, leaving)
        while os.path.lexists(leaving):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(leaving)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        rest = "" if os.path.lexists(run_dir) else f"; its rest is {leaving}"
        warnings.warn(
            f"run folder {run_dir} cannot be removed: {reason_of(error)}{where}{rest}", HpcJobsWarning, stacklevel=3
        )
        return False
    return True
