"""The sweep's folder: its definition, its submitted arrays, and the state of each cell.

    sweep-NAME/            0700
      sweep.json           the definition: job, cells, throttle
      function.pkl         of a sweep over a Python function
      lock                 held while something is submitted
      completed.json       state files of completed cells, so that `status` reads each once
      cells/ID/            one cell: state.json, metrics.jsonl, summary.json, checkpoints/ ... (its run folder)
      chunks/0001/         one array: a run folder like any other, and
        cells.sh           line N gives the batch script its cell N
        chunk.json         the ids of those lines; written last: a chunk without it was never complete
        owner              a link with the id of the array that may run this chunk, which is the first to make it
        7/                 task 7 of the array: its state; `cell` links to its cell's folder

A chunk is prepared, then submitted, then recorded (submitted.json). A chunk that a crash left unrecorded is found in
the queue by the path of its script, or by its `owner`.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import (
    ConfigError,
    HpcJobsWarning,
    RequestError,
    UnknownJobError,
    nearest,
    reason_of,
    warn_without_locks,
)
from hpcjobs.files import AppendStore, StoredLine, is_own_folder, lock_file, make_own_folder, read_regular, write_beside
from hpcjobs.job.models import Job
from hpcjobs.record import SUBMITTED
from hpcjobs.record.values import read_text
from hpcjobs.run.folder import make_root
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_usable
from hpcjobs.run.select import is_known_configuration, without_unknown_configuration
from hpcjobs.site.models import Frozen
from hpcjobs.sweeps.cells import Cell, Passing

T = TypeVar("T")
NOBODY = "nobody"
_TAIL = "tail.json"


class Definition(Frozen, frozen=True):
    """The definition of a sweep: its job, its cells, and how many cells may run at once."""

    name: str
    job: Job
    cells: list[Cell]
    made_by: str
    passing: Passing | None = None
    max_parallel: int | None = None
    max_submit_jobs: int | None = None
    """Jobs that the queue takes, from the site file or found after a refusal."""
    pack: int = 1
    """Cells per array task."""
    pack_parallel: int = 1
    """Cells of an array task that run at once."""
    sizes: dict[str, Job] = {}
    """The same job in other sizes, for cells that name one (`Cell.size`)."""

    def job_of(self, size: str) -> Job:
        """The job of cells of this size.

        Raises ConfigError: the sweep has no such size.
        """
        if size and size not in self.sizes:
            raise ConfigError(f"sweep {self.name}: a chunk names the size {size[:80]!r}, which is not in sweep.json")
        return self.sizes[size] if size else self.job


class Chunk(Frozen, frozen=True):
    """One array of a sweep."""

    number: int
    cells: list[str]
    pack: int
    after: int | None = None
    """Number of the chunk that must have ended before this one starts."""
    size: str = ""
    """`Cell.size` of all its cells."""

    @property
    def tasks(self) -> int:
        """Tasks of the array."""
        return -(-len(self.cells) // self.pack)


class SweepFolder:
    """Reading and writing one sweep's folder.

    A ``foreign`` sweep, which this user has not submitted, is only read. Slurm's commands use its configuration of
    Slurm only if that is already known.
    """

    def __init__(self, path: Path, *, foreign: bool = False) -> None:
        self.path = path
        self.foreign = foreign
        self._locked = False

    def require_own(self) -> None:
        """Raise where the sweep is foreign: its files hold the commands that would run.

        Raises RequestError: names the command that submits it as the user's.
        """
        if self.foreign:
            raise RequestError(
                f"{self.path} holds a sweep that you have not submitted, whose files would decide what runs as you",
                hint="`hpcjobs sweep run` with another --name submits it as yours",
            )

    @property
    def definition(self) -> Definition:
        """The sweep's definition.

        Raises UnknownJobError: the folder has no sweep.
        """
        try:
            definition = _read(self.path / "sweep.json", Definition)
        except FileNotFoundError as error:
            raise UnknownJobError(f"{self.path} is no sweep (no sweep.json)") from error
        if not self.foreign or is_known_configuration(definition.job.slurm_conf):
            return definition
        return replace(definition, job=replace(definition.job, slurm_conf=None))

    def write_definition(self, definition: Definition) -> None:
        """Write the definition; submitted arrays stay."""
        write_beside(self.path / "sweep.json", msgspec.json.encode(definition))

    def make(self) -> None:
        """Make the folder and its subfolders, if missing."""
        make_root(self.path.parent)
        for folder in (self.path, self.path / "cells", self.path / "chunks"):
            make_own_folder(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the sweep for submission, and wait for a process that has the lock. A crash releases it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not lock_file(descriptor, by_process=True):
                warn_without_locks(self.path, f"resume sweep {self.path.name} twice")
            self._locked = True
            yield
        finally:
            self._locked = False
            os.close(descriptor)

    def being_submitted(self) -> bool:
        """Whether a process, this one included, submits for this sweep at the moment; not known of a foreign one."""
        if self.foreign:
            return False
        if self._locked:  # closing a second descriptor of the file would drop the lock
            return True
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock_file(descriptor, wait=False, by_process=True)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def tail(self) -> Entry | None:
        """The job that submits the rest of the sweep once the queue has room; None: never submitted."""
        try:
            return self._without_unknown_configuration(_read(self.path / _TAIL, Entry))
        except FileNotFoundError:
            return None

    def write_tail(self, entry: Entry) -> None:
        """Record the job that submits the rest of the sweep."""
        write_beside(self.path / _TAIL, msgspec.json.encode(entry))

    def cell_dir(self, cell_id: str) -> Path:
        """The run folder of a cell; there once the cell has started."""
        return self.path / "cells" / cell_id

    def started_cells(self) -> set[str]:
        """The cells that have a folder."""
        return set(os.listdir(self.path / "cells"))

    def chunk_dir(self, number: int) -> Path:
        """The run folder of a chunk."""
        return self.path / "chunks" / f"{number:04d}"

    def chunks(self) -> list[Chunk]:
        """Every complete chunk, in the order of submission."""
        chunks = []
        numbered = (path for path in (self.path / "chunks").iterdir() if path.name.isdecimal())
        for folder in sorted(numbered, key=lambda path: int(path.name)):
            with suppress(FileNotFoundError):  # a crash came before it was complete
                chunks.append(_read(folder / "chunk.json", Chunk))
        return chunks

    def next_number(self) -> int:
        """The number of a new chunk; removes incomplete chunks that a crash left (call with the lock held)."""
        numbers = [0]
        for folder in (self.path / "chunks").iterdir():
            if (folder / "chunk.json").exists():
                numbers.append(int(folder.name))
            else:
                shutil.rmtree(folder)
        return max(numbers) + 1

    def entry(self, chunk: Chunk) -> Entry | None:
        """The chunk's job; None: not recorded as submitted."""
        try:
            return self._without_unknown_configuration(_read(self.chunk_dir(chunk.number) / SUBMITTED, Entry))
        except FileNotFoundError:
            return None

    def _without_unknown_configuration(self, entry: Entry) -> Entry:
        return without_unknown_configuration(entry) if self.foreign else entry

    def owner(self, chunk: Chunk) -> str | None:
        """The array that runs the chunk, as a task recorded it; `NOBODY`: given up; None: no task has started.

        Older versions wrote a file; an empty one lets no task run.
        """
        path = self.chunk_dir(chunk.number) / "owner"
        try:
            return os.readlink(path)
        except FileNotFoundError:
            return None
        except OSError:
            return (read_usable(path, lambda: read_text(str(path))) or "").strip() or NOBODY

    def give_up(self, chunk: Chunk) -> str | None:
        """Let no array run the chunk, unless one does already; return the owner."""
        with suppress(FileExistsError):
            os.symlink(NOBODY, self.chunk_dir(chunk.number) / "owner")  # in one step, which no crash leaves half-done
        return self.owner(chunk)


def _read(path: Path, type: type[T]) -> T:
    """The content of a file of a sweep. A wrong file is an error: without its content a cell could run twice.

    Raises FileNotFoundError: the file is missing. ConfigError: it cannot be used.
    """
    try:
        return msgspec.json.decode(read_regular(path), type=type)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be used: {reason_of(error)}", hint="`hpcjobs sweep run` with another --name"
        ) from error


class KnownSweep(Frozen, frozen=True):
    """A submitted sweep."""

    name: str
    path: str
    time: float
    """When it was submitted last, in seconds since 1970."""


def folder_name(name: str) -> str:
    """The folder of the sweep called ``name``, below the site's run_root."""
    return f"sweep-{name}"


def _store() -> AppendStore:
    return AppendStore("sweeps")


def remember(name: str, folder: SweepFolder) -> None:
    """Put the sweep on the list of those that this user may resume and cancel.

    Raises RequestError: the list cannot be written.
    """
    known = KnownSweep(name=name, path=str(folder.path), time=time.time())
    try:
        _store().append([msgspec.json.encode(known).decode()])
    except OSError as error:
        raise RequestError(
            f"the list of your sweeps cannot be written ({error.filename}: {error.strerror}), and without it nobody"
            " could cancel or resume this one",
            hint="name a folder that you can write: export XDG_STATE_HOME=…",
        ) from error


def find_folder(name: str) -> SweepFolder:
    """The sweep of that name (one below the current folder first, then the newest), or in that folder.

    Raises UnknownJobError: no sweep has this name.
    """
    if "/" in name or os.path.isfile(os.path.join(name, "sweep.json")):
        return open_folder(Path(name).absolute())
    known = [sweep for sweep in list_sweeps() if Path(sweep.path).is_dir()]
    named = [Path(sweep.path) for sweep in known if sweep.name == name]
    if not named:
        hint = nearest(name, {sweep.name for sweep in known}) if known else "no sweep was submitted yet"
        raise UnknownJobError(f"no sweep named {name!r}", hint=hint)
    here = [path for path in named if path.is_relative_to(Path.cwd())]
    return open_folder((here or named)[0])


def open_folder(path: Path) -> SweepFolder:
    """The sweep's folder; foreign if anything is in it, and the user has not submitted the sweep."""
    exists = path.is_dir() and any(path.iterdir())
    return SweepFolder(path, foreign=exists and not _is_own(path))


def _is_own(path: Path) -> bool:
    """Whether the folder is the user's, who has submitted the sweep in it, or this is a job of that sweep."""
    if not is_own_folder(str(path)):  # it was removed, and another user made one in its place
        return False
    folder = os.path.realpath(path)
    if f"{os.path.realpath(os.environ.get('HPCJOBS_RUN_DIR', '/'))}/".startswith(f"{folder}/"):
        return True
    return any(os.path.realpath(sweep.path) == folder for sweep in list_sweeps())


def list_sweeps() -> list[KnownSweep]:
    """Every sweep, the newest first; a line or log that cannot be used is skipped, with a warning that names it."""
    known: dict[str, KnownSweep] = {}
    for line in _store().read(lambda error: _warn(error.filename, error.strerror)):
        if (sweep := _decode(line)) is not None:
            known[sweep.path] = sweep
    return sorted(known.values(), key=lambda sweep: sweep.time, reverse=True)


def _decode(line: StoredLine) -> KnownSweep | None:
    try:
        return msgspec.json.decode(line.text, type=KnownSweep)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _warn(line, error)
        return None


def _warn(place: object, reason: object) -> None:
    warnings.warn(f"{place} cannot be used: {reason}", HpcJobsWarning, stacklevel=3)
