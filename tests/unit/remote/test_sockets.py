"""Where ssh keeps the sockets of its connections."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcjobs.remote import connection


def test_a_folder_in_tmp_has_a_name_that_nobody_can_take_beforehand(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / ("long" * 30)))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = Path(connection._socket_folder())
    try:
        assert folder.parent == Path("/tmp")
        assert folder.name not in (f"hpcjobs-ssh-{os.getuid()}", f"hpcjobs-{os.getuid()}"), folder
        assert folder.stat().st_mode & 0o077 == 0
        assert Path(connection._socket_folder()) == folder
        folder.chmod(0o777)  # as if another user had made it
        other = Path(connection._socket_folder())
        assert other != folder
        other.rmdir()
    finally:
        folder.rmdir()
