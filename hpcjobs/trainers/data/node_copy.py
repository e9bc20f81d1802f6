"""A copy of data on a node's own disk: complete or under another name, made by many threads, used again while it fits.

Its name has the path of the source and a hash of the names, sizes and times of its files. What an interrupted copy has
is used by the next one, and so are files of an older state that have not changed since.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

THREADS = 16
"""A small file costs a parallel file system the time of its requests, during which others can be copied."""
PIECE_BYTES = 4 << 20
REPORT_S = 0.5
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True, slots=True)
class SourceFile:
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
    """Copies sources into `folder`; `report` hears of the progress every `REPORT_S`, whatever a file takes."""

    folder: Path
    report: Report
    progress: CopyProgress = field(default_factory=CopyProgress)
    copied_files: int = 0
    """Without those that were there."""

    def copy(self, sources: Sequence[Path]) -> dict[Path, Path]:
        """The copy of each source.

        Raises:
            OSError: something cannot be read or written; with ENOSPC, what was copied is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
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
        with self._lock(beside):
            root = target if target.exists() else beside / "data"
            try:
                self._complete(source, root, pool)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    shutil.rmtree(beside, ignore_errors=True)  # or the disk stays full for all who use it
                raise
            if root is not target:
                root.rename(target)
            beside.rmdir()
        return target

    def _complete(self, source: Source, root: Path, pool: ThreadPoolExecutor) -> None:
        """Copy what `root` lacks; files that older copies have with this size and time are linked."""
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in source.folders:
            (root / folder).mkdir(exist_ok=True)
        older = [path for path in sorted(self.folder.glob(glob_copies(source.path))) if path != root]
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
            wait(running)  # nothing is written once this is left
        self.copied_files += len(files)

    @contextmanager
    def _lock(self, beside: Path) -> Iterator[None]:
        """One process at a time makes a copy; the lock of one that was killed is free."""
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
    """A name of its own for each state of the source: what has changed since it was copied is copied again."""
    state = hashlib.sha256(os.fsencode("\0".join(source.folders)))
    for file in source.files:
        state.update(os.fsencode(f"\0{file.path}\0{file.size_bytes}\0{file.mtime_ns}"))
    return f"{source.path.stem}-{_hash_place(source.path)}-{state.hexdigest()[:8]}{source.path.suffix}"


def glob_copies(path: Path) -> str:
    """A pattern of the names that copies of this path have, whatever its state was."""
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
    """Copy one file beside its target and rename it, yielding the bytes of each piece.

    Raises:
        OSError: one of them cannot be read or written, or (ESTALE) the source has changed since it was listed.
    """
    beside = target.with_name(f"{target.name}.part")
    with open(source, "rb", buffering=0) as reading, open(beside, "wb") as writing:
        while piece := reading.read(PIECE_BYTES):
            writing.write(piece)
            yield len(piece)
    if not is_same(source, file):
        raise OSError(errno.ESTALE, "changed while it was copied", str(source))
    os.utime(beside, ns=(file.mtime_ns, file.mtime_ns))
    beside.replace(target)
