"""A job's run folder as one tar file, with the checksum of every file and the records of its end."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs import __version__
from hpcjobs.errors import RequestError, reason_of
from hpcjobs.files import file_name
from hpcjobs.run.index import Entry
from hpcjobs.run.status import Connect, statuses
from hpcjobs.scheduler.connect import connect

SUMS, ABOUT = "SHA256SUMS", "ARCHIVE.json"


class Archive(NamedTuple):
    """What was written."""

    path: Path
    files: int
    size: int
    """Bytes of the tar file."""


class _Summed(io.RawIOBase):
    """A file whose checksum is computed while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


def archive(entry: Entry, path: Path | None = None, *, connect: Connect = connect) -> Archive:
    """Write the tar file (``.gz`` and ``.xz`` compress it); default ``NAME_ID.tar`` in the current folder.

    ``sha256sum -c SHA256SUMS`` checks it once it is unpacked.

    Raises:
        RequestError: the job has not ended, its folder is not there, or a file cannot be read or written.
    """
    run_dir = Path(entry.run_dir)
    if not os.path.isdir(run_dir):
        raise RequestError(f"job {entry.job_id} has no run folder any more: {run_dir}")
    entry = replace(entry, task=None)  # the folder is that of all tasks
    (known,) = statuses([entry], connect=connect)
    if any(not record.state.ended for record in known.records):
        states = ", ".join(dict.fromkeys(record.state.value for record in known.records))
        raise RequestError(f"job {entry.job_id} is {states}: its files still change", hint="hpcjobs wait, then archive")
    target = path or Path(f"{file_name(entry.name)}_{entry.job_id}.tar")
    if target.exists():
        raise RequestError(f"{target} exists already", hint="--output names another file")
    if run_dir.resolve() in target.absolute().resolve().parents:
        raise RequestError(f"{target} would lie in the run folder itself", hint="--output names another place")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    about = {
        "schema": 1, "hpcjobs": __version__, "created": time.time(), "entry": entry, "records": known.records,
        "run_dir": str(run_dir),
    }  # fmt: skip
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # as private as the run folder
        with os.fdopen(descriptor, "wb") as file:
            count = _write(file, run_dir, msgspec.json.format(msgspec.json.encode(about), indent=2), _mode(target))
        os.replace(partial, target)
    except OSError as error:
        raise RequestError(f"{error.filename or target}: {reason_of(error)}: no archive was written") from error
    finally:
        partial.unlink(missing_ok=True)
    return Archive(target, count, target.stat().st_size)


def _mode(target: Path) -> str:
    return {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz"}.get(target.suffix, "w")


def _write(file: IO[bytes], run_dir: Path, about: bytes, mode: str) -> int:
    """Fill the tar; the number of the job's files."""
    sums = [f"{hashlib.sha256(about).hexdigest()}  {ABOUT}\n"]
    with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        _add_text(tar, ABOUT, about)
        for path in _paths(run_dir):
            name = str(Path(run_dir.name, path.relative_to(run_dir)))
            member = tar.gettarinfo(path, arcname=name)
            if not stat.S_ISREG(path.lstat().st_mode):
                tar.addfile(member)
                continue
            member.type, member.linkname = tarfile.REGTYPE, ""  # a second name of a file is a file of its own
            with path.open("rb") as content:
                member.size = os.fstat(content.fileno()).st_size
                summed = _Summed(content)
                tar.addfile(member, summed)
            sums.append(f"{summed.sum.hexdigest()}  {name}\n")
        _add_text(tar, SUMS, "".join(sums).encode("utf-8", "surrogateescape"))
    return len(sums) - 1


def _paths(run_dir: Path) -> Iterator[Path]:
    """The folder, and files, folders and links in it, in order; sockets and pipes of a server are left out."""
    yield run_dir
    for parent, folders, files in os.walk(run_dir, onerror=_raise):
        folders.sort()
        for name in sorted((*files, *folders)):
            path = Path(parent, name)
            if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _add_text(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
    tar.addfile(member, io.BytesIO(content))
