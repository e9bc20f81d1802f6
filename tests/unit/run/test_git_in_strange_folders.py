"""The configuration of a repository runs nothing when hpcjobs asks git about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commandline import ok


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize("key", ["core.fsmonitor", "diff.external", "diff.x.textconv", "diff.x.command"])
def test_a_submission_runs_nothing_that_the_repository_configures(here: Path, tmp_path: Path, key: str) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho other text\n")
    trap.chmod(0o755)
    git("init", "-q")
    (here / ".gitignore").write_text("runs\n")
    (here / ".gitattributes").write_text("*.py diff=x\n")
    (here / "train.py").write_text("one\r\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (here / "train.py").write_text("two\n")
    git("config", key, str(trap))
    git("config", "color.ui", "always")
    ok("submit", "--site", "local", "--snapshot", "--wait", "true")
    assert not (tmp_path / "ran").exists()
    (patch,) = here.glob("runs/true-*/code.patch")
    assert "\x1b" not in patch.read_text()
    (here / "train.py").unlink()
    git("checkout", "train.py")
    git("apply", str(patch))
    assert (here / "train.py").read_text() == "two\n"
