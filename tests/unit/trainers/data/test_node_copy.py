"""A copy of many files: complete, resumed, brought up to date, and refused where it does not fit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.trainers.data import staging
from hpcjobs.trainers.data.staging import CopyProgress, NodeCopy

FOLDERS, FILES = 100, 100


def make_files(root: Path, folders: int = FOLDERS, files: int = FILES) -> Path:
    for folder in range(folders):
        (root / f"n{folder:03}").mkdir(parents=True)
        for file in range(files):
            (root / f"n{folder:03}" / f"{file}.bin").write_bytes(bytes([file % 256]) * (1 + folder))
    (root / "empty").mkdir()
    return root


def read_all(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


def copy_to(disk: Path, source: Path) -> tuple[Path, NodeCopy, list[CopyProgress]]:
    seen: list[CopyProgress] = []
    copy = NodeCopy(disk, seen.append)
    return copy.copy([source])[source], copy, seen


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("many") / "pictures", 30)


def test_ten_thousand_small_files_are_copied_once_with_progress(tmp_path: Path) -> None:
    many = make_files(tmp_path / "pictures.v1")
    target, copy, seen = copy_to(tmp_path / "disk", many)
    assert read_all(target) == read_all(many)
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == [target.name]
    assert target.name.startswith("pictures-")
    assert copy.copied_files == FOLDERS * FILES
    assert (seen[-1].files, seen[-1].files_total) == (FOLDERS * FILES, FOLDERS * FILES)
    assert seen[-1].size_bytes == seen[-1].total_bytes == sum(FILES * (1 + folder) for folder in range(FOLDERS))
    again, copy, _ = copy_to(tmp_path / "disk", many)
    assert (again, copy.copied_files) == (target, 0)


def test_of_a_changed_source_only_what_changed_is_read_again(tmp_path: Path) -> None:
    source = make_files(tmp_path / "data", 3, 4)
    first, _, _ = copy_to(tmp_path / "disk", source)
    (source / "n001/2.bin").write_bytes(b"other")
    (source / "n002/3.bin").unlink()
    (source / "n002/new.bin").write_bytes(b"new")
    before = read_all(first)
    second, copy, _ = copy_to(tmp_path / "disk", source)
    assert second != first
    assert read_all(second) == read_all(source)
    assert copy.copied_files == 2
    assert read_all(first) == before, "a running job may read the older copy"


def test_a_file_that_a_cleaner_removed_from_the_copy_is_copied_again(tmp_path: Path) -> None:
    source = make_files(tmp_path / "data", 2, 3)
    target, _, _ = copy_to(tmp_path / "disk", source)
    (target / "n001/1.bin").unlink()
    (target / "n000/0.bin").write_bytes(b"cut off")
    again, copy, _ = copy_to(tmp_path / "disk", source)
    assert (again, copy.copied_files) == (target, 2)
    assert read_all(target) == read_all(source)


COPIER = """
import itertools, os, signal, sys, threading
from pathlib import Path
from hpcjobs.trainers.data import staging
staging.REPORT_S = 0.001
copy_file, numbers, continued = staging.copy_file, itertools.count(1), threading.Event()
def copy_a_hundred(*arguments):
    if next(numbers) > 100:
        continued.wait()
    yield from copy_file(*arguments)
staging.copy_file = copy_a_hundred
def stop_once(progress):
    if progress.files >= 100 and not continued.is_set():
        print(progress.files, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        continued.set()
staging.NodeCopy(Path(sys.argv[1]), stop_once).copy([Path(sys.argv[2])])
"""
"""A copy that stops itself after a hundred files."""


def test_a_copy_that_was_killed_is_resumed_with_the_files_that_it_has(many: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", COPIER, str(disk), str(many)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) < 30 * FILES
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert [entry.name.startswith(".") for entry in disk.iterdir()] == [True], "no copy has the name of a complete one"
    target, copy, _ = copy_to(disk, many)
    assert 0 < copy.copied_files < 30 * FILES
    assert read_all(target) == read_all(many)
    assert [entry.name for entry in disk.iterdir()] == [target.name]


def test_of_two_jobs_on_a_node_one_copies_and_the_other_waits(many: Path, tmp_path: Path) -> None:
    """The first one goes on when the second one says that it waits."""
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", COPIER, str(disk), str(many)]
    waits: list[bool] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) < 30 * FILES

        def report(progress: CopyProgress) -> None:
            waits.append(progress.waits)
            if progress.waits:
                process.send_signal(signal.SIGCONT)

        copy = NodeCopy(disk, report)
        target = copy.copy([many])[many]
        process.stdout.read()
    assert process.returncode == 0
    assert any(waits)
    assert copy.copied_files == 0
    assert read_all(target) == read_all(many)


def test_what_cannot_fit_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "huge.bin"
    with open(source, "wb") as file:
        file.truncate(8 << 40)
    with pytest.raises(OSError, match=r"8\.8e\+03 GB are to be copied, .* GB are free") as caught:
        copy_to(tmp_path / "disk", source)
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the bytes, and not for so many files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root mounts a disk of its own")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M,nr_inodes=50", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_is_named_and_left_empty(small_disk: Path, tmp_path: Path) -> None:
    source = make_files(tmp_path / "data", 5, 20)
    with pytest.raises(OSError, match="No space left on device") as caught:
        copy_to(small_disk, source)
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_files(tmp_path / "data", 1, 2)
    real = staging.require_space

    def change(folder: Path, size_bytes: int) -> None:
        (source / "n000/1.bin").write_bytes(b"longer than before")
        real(folder, size_bytes)

    monkeypatch.setattr(staging, "require_space", change)
    with pytest.raises(OSError, match="changed while it was copied"):
        copy_to(tmp_path / "disk", source)


def test_links_are_followed_and_one_to_a_folder_above_is_refused(tmp_path: Path) -> None:
    source = make_files(tmp_path / "data", 1, 2)
    (source / "linked").symlink_to(source / "n000")
    target, _, _ = copy_to(tmp_path / "disk", source)
    assert (target / "linked/1.bin").read_bytes() == (source / "n000/1.bin").read_bytes()
    (source / "n000/above").symlink_to(source)
    with pytest.raises(OSError, match="a link leads to a folder above it"):
        copy_to(tmp_path / "disk", source)


def test_progress_is_reported_while_one_large_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "REPORT_S", 0.001)
    monkeypatch.setattr(staging, "PIECE_BYTES", 1 << 12)
    source = tmp_path / "tokens.bin"
    source.write_bytes(os.urandom(1 << 22))
    in_between, copy_file = threading.Event(), staging.copy_file

    def copy_slowly(*of_one_file: Any) -> Iterator[int]:
        for pieces, size_bytes in enumerate(copy_file(*of_one_file)):
            yield size_bytes
            if pieces == 3:  # the rest is copied once a report of these was seen
                assert in_between.wait(60)

    def see(progress: CopyProgress) -> None:
        if 0 < progress.size_bytes < 1 << 22:
            in_between.set()

    monkeypatch.setattr(staging, "copy_file", copy_slowly)
    target = NodeCopy(tmp_path / "disk", see).copy([source])[source]
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("planted", ["folder", "copy", "link"])
def test_a_copy_is_not_made_of_what_another_user_has_planted(tmp_path: Path, planted: str) -> None:
    """Name, sizes and times of a copy can be worked out beforehand; its content would be trained on."""
    source, disk = make_files(tmp_path / "data", 1, 2), tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o1777)
    if planted == "folder":
        (disk / "you").mkdir()
        os.chown(disk / "you", 65534, 65534)
        disk = disk / "you"
    else:
        target, _, _ = copy_to(disk, source)
        (target / "n000" / "0.bin").unlink()
        if planted == "link":
            target.rename(tmp_path / "mine")
            target.symlink_to(tmp_path / "mine")
        os.chown(target, 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match="belongs to another user"):
        copy_to(disk, source)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_no_file_of_an_older_copy_of_another_user_is_taken(tmp_path: Path) -> None:
    source, disk = make_files(tmp_path / "data", 1, 2), tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o1777)
    older, _, _ = copy_to(disk, source)
    changed = older / "n000" / "0.bin"
    status = changed.stat()
    changed.write_bytes(b"?")
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chown(older, 65534, 65534)
    (source / "new.bin").write_bytes(b"1")
    newer, _, _ = copy_to(disk, source)
    assert read_all(newer) == read_all(source)
