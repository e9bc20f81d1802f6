"""The files for administrators: modulefiles and the snippet for login shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hpcjobs.data import data_folder

CENTRE = data_folder("templates") / "centre"


def test_a_login_shell_has_the_command_and_the_centres_site_files_once(tmp_path: Path) -> None:
    text = (CENTRE / "profile.sh").read_text(encoding="utf-8").replace("/apps/hpcjobs", str(tmp_path))
    (tmp_path / "current" / "command").mkdir(parents=True)
    command = tmp_path / "current" / "command" / "hpcjobs"
    command.write_text('#!/bin/sh\necho "$HPCJOBS_SITE_PATH"\n')
    command.chmod(0o755)
    (tmp_path / "profile.sh").write_text(text)
    script = f'. {tmp_path}/profile.sh; . {tmp_path}/profile.sh; hpcjobs; echo "$PATH"'
    done = subprocess.run(
        ["sh", "-euc", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    sites, path = done.stdout.splitlines()
    assert sites == f"{tmp_path}/site_configs"
    assert path == f"/usr/bin:/bin:{tmp_path}/current/command"


def test_both_modulefiles_name_the_same_folders() -> None:
    for name in ("hpcjobs.lua", "hpcjobs.tcl"):
        text = (CENTRE / name).read_text(encoding="utf-8")
        assert "/apps/hpcjobs/" in text
        assert "/apps/hpcjobs/site_configs" in text
        assert "command" in text
