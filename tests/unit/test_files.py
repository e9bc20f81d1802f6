"""Files that other processes watch."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from hpcjobs.files import append_lines, read_regular, state_dir, write_beside


def test_what_is_written_beside_reaches_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a crash leaves an empty file in the place of a complete one; and the folder, or none at all."""
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def recorded_sync(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        steps.append("sync folder" if stat.S_ISDIR(mode) else f"sync {os.fstat(descriptor).st_size} bytes")
        sync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_beside(tmp_path / "entry.json", "four")
    assert steps == ["sync 4 bytes", "rename", "sync folder"]
    steps.clear()
    write_beside(tmp_path / "cache", "four", durable=False)
    assert steps == ["rename"]


def test_a_file_for_others_has_its_permissions_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_beside(tmp_path / "shared", "", mode=0o644)
        write_beside(tmp_path / "private", "")
        write_beside(tmp_path / "as the umask says", "", mode=None)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()}
    assert modes == {"shared": 0o644, "private": 0o600, "as the umask says": 0o600}


def test_a_file_system_without_permissions_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    for mode in (0o600, 0o644, None):
        write_beside(tmp_path / "file", str(mode), mode=mode)
        assert (tmp_path / "file").read_text() == str(mode)


def test_a_line_after_one_that_a_full_disk_cut_off_stands_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append_lines(log, ["one", "two"])
    with log.open("a") as file:
        file.write("thr")
    append_lines(log, ["four"])
    assert log.read_text().splitlines() == ["one", "two", "thr", "four"]
    assert log.stat().st_mode & 0o777 == 0o600


def test_the_state_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that runs elsewhere must not look for it in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert state_dir() == tmp_path / "state" / "hpcjobs"


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says which file it cannot open, and not which it cannot write."""

    def find_no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", find_no_room)
    path = tmp_path / "lines"
    with pytest.raises(OSError, match="No space left") as written:
        write_beside(path, "one")
    with pytest.raises(OSError, match="No space left") as appended:
        append_lines(path, ["one"])
    assert (written.value.filename, appended.value.filename) == (str(path), str(path))


def test_a_file_that_cannot_be_written_is_named_and_not_the_one_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "hpcjobs.yaml"
    with pytest.raises(FileNotFoundError) as refused:
        write_beside(path, "site: local\n")
    assert refused.value.filename == str(path)


def test_a_small_file_is_read_into_memory_of_its_size(tmp_path: Path) -> None:
    """`ps` and `wait` read thousands: room for the largest file takes ten times as long as the file."""
    path = tmp_path / "state.json"
    path.write_text("small")
    tracemalloc.start()
    try:
        assert read_regular(path) == b"small"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
