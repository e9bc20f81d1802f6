"""`--stage-to`: one rank of each node copies the data to the node's own disk, and all ranks read it there.

The other ranks wait for a key in the launch's store: a copy may exceed the time limit of a collective. Each rank that
copies increases a counter in the store, and rank 0 watches the counters. The store ends with rank 0.

Threads copy the files under a temporary name, and the complete copy is renamed. Its name has the source's path and a
hash of the names, sizes and times of its files. The next copy uses unchanged files of an interrupted or older one.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from hpcjobs.files import FULL, find_planted, require_unplanted, write_beside
from hpcjobs.runtime.exits import PeerLost, TrainerError, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup

THREADS = 16
"""A small file costs a parallel file system the time of its requests, during which others can be copied."""
PIECE_BYTES = 4 << 20
REPORT_S = 0.5
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to copy, with its size and time when it was listed."""

    path: str
    """Relative to the source; empty where the source is one file."""
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """A file, or a folder with all that is below it; links are followed."""

    path: Path
    folders: Sequence[str]
    files: Sequence[SourceFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class CopyProgress:
    """How far a node is, of all sources together. `files_total` grows while folders are listed."""

    files: int = 0
    files_total: int = 0
    size_bytes: int = 0
    total_bytes: int = 0
    waits: bool = False
    """For another process that makes the same copy."""


Report = Callable[[CopyProgress], None]


@dataclass
class NodeCopy:
    """Copies sources into `folder`, and reports the progress every `REPORT_S`, also during a large file."""

    folder: Path
    report: Report
    progress: CopyProgress = field(default_factory=CopyProgress)
    copied_files: int = 0
    """Excludes files that were already there."""

    def copy(self, sources: Sequence[Path]) -> dict[Path, Path]:
        """The copy of each source.

        Raises OSError: a file cannot be read or written; with ENOSPC, the partial copy is removed.
        """
        require_unplanted(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        require_unplanted(self.folder)
        with ThreadPoolExecutor(THREADS) as pool:
            listed = [self._list(source, pool) for source in sources]
            self._advance(total_bytes=sum(one.size_bytes for one in listed))
            return {one.path: self._copy_source(one, pool) for one in listed}

    def _list(self, source: Path, pool: ThreadPoolExecutor) -> Source:
        """All files and folders, listed once, many folders at a time."""
        if not source.is_dir():
            status = source.stat()
            self._advance(files_total=self.progress.files_total + 1)
            return Source(source, (), (SourceFile("", status.st_size, status.st_mtime_ns),))
        folders, files, before = [""], list[SourceFile](), self.progress.files_total
        running: set[Future[Any]] = {pool.submit(list_folder, source, "", ())}
        while running:
            done, running = wait(running, timeout=REPORT_S, return_when=FIRST_COMPLETED)
            for future in done:
                listing = future.result()
                files += listing.files
                folders += listing.folders
                running |= {pool.submit(list_folder, source, one, listing.parents) for one in listing.folders}
            self._advance(files_total=before + len(files))
        return Source(source, sorted(folders), sorted(files, key=lambda file: file.path))

    def _copy_source(self, source: Source, pool: ThreadPoolExecutor) -> Path:
        target = self.folder / name_copy(source)
        beside = target.with_name(f".{target.name}.part")
        for path in (target, beside):  # names that another user can work out
            require_unplanted(path)
        with self._lock(beside):
            root = target if target.exists() else beside / "data"
            try:
                self._complete(source, root, pool)
            except OSError as error:
                if error.errno in FULL:
                    shutil.rmtree(beside, ignore_errors=True)  # or the disk stays full for all who use it
                raise
            if root is not target:
                root.rename(target)
            beside.rmdir()
        return target

    def _complete(self, source: Source, root: Path, pool: ThreadPoolExecutor) -> None:
        """Add the missing files to `root`: link them from older copies with the same size and time, or copy them."""
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in source.folders:
            (root / folder).mkdir(exist_ok=True)
        copies = sorted(self.folder.glob(glob_copies(source.path)))
        older = [path for path in copies if path != root and find_planted(path) is None]
        lacking = []
        for file in source.files:
            if is_same(root / file.path, file) or link_older(file, older, root / file.path):
                self._count(1, file.size_bytes)
            else:
                lacking.append(file)
        self._advance()
        require_space(self.folder, sum(file.size_bytes for file in lacking))
        self._copy_files(source, lacking, root, pool)

    def _copy_files(self, source: Source, files: Sequence[SourceFile], root: Path, pool: ThreadPoolExecutor) -> None:
        """Each thread takes the next file; pieces that they have copied are counted here."""
        remaining, pieces, stop = iter(files), deque[tuple[int, int]](), threading.Event()

        def copy_next() -> None:
            for file in remaining:
                for size_bytes in copy_file(source.path / file.path, root / file.path, file):
                    pieces.append((0, size_bytes))
                    if stop.is_set():
                        return
                pieces.append((1, 0))

        running = {pool.submit(copy_next) for _ in range(min(THREADS, len(files)))}
        try:
            while running:
                done, running = wait(running, timeout=REPORT_S, return_when=FIRST_COMPLETED)
                while pieces:
                    self._count(*pieces.popleft())
                self._advance()
                for future in done:
                    future.result()
        finally:
            stop.set()
            wait(running)  # no thread writes after this function ends
        self.copied_files += len(files)

    @contextmanager
    def _lock(self, beside: Path) -> Iterator[None]:
        """Hold the lock of a copy, so that one process at a time makes it; a killed process releases its lock."""
        while True:
            beside.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._await_lock(descriptor)
                if os.fstat(descriptor).st_nlink:  # 0: removed by the process that had it
                    yield
                    return
            finally:
                os.close(descriptor)

    def _await_lock(self, descriptor: int) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._advance(waits=True)
                time.sleep(REPORT_S)
                continue
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            self._advance(waits=False)
            return

    def _count(self, files: int, size_bytes: int) -> None:
        now = self.progress
        self.progress = replace(now, files=now.files + files, size_bytes=now.size_bytes + size_bytes)

    def _advance(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        self.report(self.progress)


@dataclass(frozen=True)
class FileListing:
    """One folder: its files and folders, and the folders above with itself, by device and inode."""

    files: Sequence[SourceFile]
    folders: Sequence[str]
    parents: tuple[tuple[int, int], ...]


def list_folder(source: Path, relative: str, parents: tuple[tuple[int, int], ...]) -> FileListing:
    """The content of a folder below `source`; a link to a folder above it is an error (ELOOP)."""
    folder = source / relative
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in parents:
        raise OSError(errno.ELOOP, "a link leads to a folder above it", str(folder))
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = os.path.join(relative, entry.name)
            if entry.is_dir():
                folders.append(path)
                continue
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "neither a file nor a folder", entry.path)
            files.append(SourceFile(path, status.st_size, status.st_mtime_ns))
    return FileListing(files, folders, (*parents, here))


def name_copy(source: Source) -> str:
    """Return a name that depends on the state of the source, so changed data is copied again."""
    state = hashlib.sha256(os.fsencode("\0".join(source.folders)))
    for file in source.files:
        state.update(os.fsencode(f"\0{file.path}\0{file.size_bytes}\0{file.mtime_ns}"))
    return f"{source.path.stem}-{_hash_place(source.path)}-{state.hexdigest()[:8]}{source.path.suffix}"


def glob_copies(path: Path) -> str:
    """Return a glob pattern for the names of all copies of this path."""
    return f"{glob.escape(path.stem)}-{_hash_place(path)}-????????{glob.escape(path.suffix)}"


def _hash_place(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]


def is_same(path: Path, file: SourceFile) -> bool:
    """Whether `path` is a complete copy: the time is set when all bytes are there."""
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def link_older(file: SourceFile, older: Sequence[Path], target: Path) -> bool:
    """Make `target` a second name of the same file in an older copy, where one has it."""
    for copy in older:
        if is_same(copy / file.path, file):
            target.unlink(missing_ok=True)
            try:
                os.link(copy / file.path, target)
            except OSError:  # a file system without links, or the copy is being removed: it is read again
                return False
            return True
    return False


def require_space(folder: Path, size_bytes: int) -> None:
    """Raise ENOSPC before anything is copied."""
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        text = f"{os.strerror(errno.ENOSPC)}: {size_bytes / 1e9:.3g} GB are to be copied, {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, text, str(folder))


def copy_file(source: Path, target: Path, file: SourceFile) -> Iterator[int]:
    """Copy one file under a temporary name and rename it; yields the bytes of each piece.

    Raises OSError: one of them cannot be read or written, or (ESTALE) the source has changed since it was listed.
    """
    beside = target.with_name(f"{target.name}.part")
    with open(source, "rb", buffering=0) as reading, open(beside, "wb") as writing:
        while piece := reading.read(PIECE_BYTES):
            writing.write(piece)
            yield len(piece)
    if not is_same(source, file):
        raise OSError(errno.ESTALE, "changed while it was copied", str(source))
    # before the rename: `is_same` takes a file of this size and time for complete
    os.utime(beside, ns=(file.mtime_ns, file.mtime_ns))
    beside.replace(target)


PROGRESS_FILE = "staging.json"
"""In the run folder while data is copied: `hpcjobs wait` shows it."""
LOG_S = 10.0
FIRST_POLL_S, MOST_POLL_S = 0.02, 1.0
SILENT_S = 60.0
"""A rank is taken for dead if its count does not change for this long."""


def stage_data(config: Config, group: RankGroup) -> Config:
    """Return the flags with the paths of the copies.

    Raises UsageError: --tokens names a file instead of its folder, or a copy cannot be made. PeerLost: the rank that
    copies on a node no longer runs.
    """
    if config.stage_to is None:
        return config
    files = [path for path in config.tokens if Path(path).is_file()]
    if files:
        raise UsageError(f"--stage-to copies whole folders of --tokens, and {files[0]} is a file", hint="its folder")
    named = (*config.text, *config.tokens, *(() if config.data is None else (config.data,)))
    copies = Staging(group, Path(config.stage_to)).stage([Path(path) for path in named])
    place = {path: copies.get(str(Path(path)), path) for path in named}
    return replace(
        config,
        data=None if config.data is None else place[config.data],
        text=tuple(place[path] for path in config.text),
        tokens=tuple(place[path] for path in config.tokens),
    )


@dataclass
class Staging:
    """One rank's part in copying data to the nodes."""

    group: RankGroup
    folder: Path
    silent_s: float = SILENT_S
    _began: float = field(default_factory=time.monotonic)
    _beats: int = 0
    _watch: StagingWatch | None = None

    def __post_init__(self) -> None:
        self._store = PrefixStore("staging", self.group.store)
        self._copier = self.group.hosts.index(self.group.hosts[self.group.rank])
        if self.group.rank == 0:
            copiers = sorted({self.group.hosts.index(host) for host in self.group.hosts})
            self._watch = StagingWatch(self.group, self._store, copiers, self.silent_s)

    def stage(self, sources: Sequence[Path]) -> dict[str, str]:
        """Return the copy of each existing source, once all nodes have copied."""
        if self.group.rank == self._copier:
            try:
                self._copy(sources)
            except TrainerError as error:
                self._store.set("error", json.dumps([int(error.code), str(error)]))
                if self._watch is not None:
                    self._watch.close()
                raise
        poll_s = FIRST_POLL_S
        while not self._store.check(["ready"]):
            self._look()
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MOST_POLL_S)
        copies: dict[str, str] = json.loads(self._store.get(f"copies/{self._copier}"))
        return copies

    def _copy(self, sources: Sequence[Path]) -> None:
        """Copy the existing sources; the workload reports missing files."""
        copy = NodeCopy(self.folder, self._report)
        try:
            copies = copy.copy([source for source in sources if source.exists()])
        except OSError as error:
            where = f"rank {self.group.rank} on {self.group.hosts[self.group.rank]}"
            full = error.errno in FULL
            hint = "a folder on a local disk with space" if full else "the data must be readable, and stay as it is"
            raise UsageError(f"--stage-to {self.folder}: {error} ({where})", hint=hint) from error
        targets = {str(source): str(target) for source, target in copies.items()}
        self._store.set(f"copies/{self.group.rank}", json.dumps(targets))
        seconds, done = time.monotonic() - self._began, copy.progress
        self.group.log(
            f"staged {len(copies)} of {len(sources)} to {self.folder} in {seconds:.1f} s: {done.files:,} files, "
            f"{done.size_bytes / 1e9:.3g} GB, {copy.copied_files:,} of them copied now"
        )

    def _report(self, progress: CopyProgress) -> None:
        self._beats += 1
        self._store.set(f"progress/{self.group.rank}", json.dumps({"beats": self._beats, **asdict(progress)}))
        self._look()

    def _look(self) -> None:
        """Raise the error that another rank reported or that rank 0 found."""
        if self._store.check(["error"]):
            code, text = json.loads(self._store.get("error"))
            error = TrainerError(text)
            error.code = code
            raise error
        if self._watch is None:
            return
        try:
            self._watch.look()
        except TrainerError as error:
            self._store.set("error", json.dumps([int(error.code), str(error)]))
            self._watch.close()
            raise


class StagingWatch:
    """Rank 0's watch over the ranks that copy: reports their progress, and raises if one no longer runs."""

    def __init__(self, group: RankGroup, store: PrefixStore, copiers: Sequence[int], silent_s: float) -> None:
        self._group, self._store, self._copiers, self._silent_s = group, store, copiers, silent_s
        self._beats = dict.fromkeys(copiers, 0)
        self._silence_s = dict.fromkeys(copiers, 0.0)
        self._looked = self._logged = time.monotonic()
        folder = os.environ.get("HPCJOBS_RUN_DIR")
        self._file = None if folder is None else Path(folder) / PROGRESS_FILE

    def look(self) -> None:
        """Raise `PeerLost` if a rank stopped counting; notify all ranks once every node is ready."""
        now = time.monotonic()
        passed_s = min(now - self._looked, 2 * MOST_POLL_S)  # more: this process was suspended, as were the others
        self._looked = now
        pending = [rank for rank in self._copiers if not self._store.check([f"copies/{rank}"])]
        if not pending:
            self._store.set("ready", "")
            self.close()
            return
        progress = {rank: self._read(rank) for rank in pending}
        for rank, (beats, _) in progress.items():
            silent = beats == self._beats[rank] and rank != self._group.rank
            self._silence_s[rank] = self._silence_s[rank] + passed_s if silent else 0.0
            self._beats[rank] = beats
            if self._silence_s[rank] > self._silent_s:
                raise PeerLost(
                    f"rank {rank} on {self._group.hosts[rank]}, which copies data for --stage-to, has not reported "
                    f"for {self._silent_s:.0f} s",
                    hint="the node's log says whether it was killed",
                )
        if now - self._logged >= LOG_S:
            self._logged = now
            self._show({rank: one for rank, (_, one) in progress.items()})

    def close(self) -> None:
        """Remove the progress file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _read(self, rank: int) -> tuple[int, CopyProgress]:
        if not self._store.check([f"progress/{rank}"]):
            return 0, CopyProgress()
        fields = json.loads(self._store.get(f"progress/{rank}"))
        return fields.pop("beats"), CopyProgress(**fields)

    def _show(self, pending: dict[int, CopyProgress]) -> None:
        """Log the node that is furthest behind, and the number of ready nodes."""
        rank, last = min(pending.items(), key=lambda item: item[1].size_bytes / max(1, item[1].total_bytes))
        host, ready = self._group.hosts[rank], len(self._copiers) - len(pending)
        self._group.log(f"staging: {ready} of {len(self._copiers)} nodes ready; {host}: {describe_progress(last)}")
        if self._file is not None:
            fields = {"nodes": len(self._copiers), "ready": ready, "host": host, **asdict(last)}
            try:
                write_beside(self._file, json.dumps(fields), mode=None, durable=False)
            except OSError as error:
                self._group.log(f"warning: the progress of staging is not shown by `hpcjobs wait`: {error}")
                self._file = None


def describe_progress(progress: CopyProgress) -> str:
    if progress.waits:
        return "waits for another job that makes the same copy"
    if not progress.total_bytes:
        return f"lists its files, {progress.files_total:,} so far"
    done, total = progress.size_bytes / 1e9, progress.total_bytes / 1e9
    return f"{progress.files:,} of {progress.files_total:,} files, {done:.3g} of {total:.3g} GB"
