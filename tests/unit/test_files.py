"""Files that other processes watch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpcjobs.files import write_beside


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
