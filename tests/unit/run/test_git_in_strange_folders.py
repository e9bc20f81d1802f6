"""The configuration of a repository runs nothing when hpcjobs asks git about it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commandline import ok, within


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize("key", ["core.fsmonitor", "diff.external", "diff.x.textconv", "diff.x.command",
                                 "filter.x.clean", "filter.x.process", "filter.a.b.clean"])  # fmt: skip
def test_a_submission_runs_nothing_that_the_repository_configures(here: Path, tmp_path: Path, key: str) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho other text\n")
    trap.chmod(0o755)
    git("init", "-q")
    (here / ".gitignore").write_text("runs\n")
    (here / ".gitattributes").write_text("*.py diff=x filter=x\n*.txt filter=a.b\n")
    (here / "train.py").write_text("one\r\n")
    (here / "notes.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (here / "train.py").write_text("two\n")
    (here / "notes.txt").write_text("two\n")
    git("config", key, str(trap))
    git("config", "color.ui", "always")
    ok("submit", "--site", "local", "--snapshot", "--wait", "true")
    assert not (tmp_path / "ran").exists()
    (patch,) = here.glob("runs/true-*/code.patch")
    assert "\x1b" not in patch.read_text()
    (here / "train.py").unlink()
    git("config", "--unset", key)
    git("checkout", "train.py", "notes.txt")
    git("apply", str(patch))
    assert (here / "train.py").read_text() == "two\n"


def test_the_configuration_of_a_submodule_runs_nothing(here: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    trap.chmod(0o755)
    inner = tmp_path / "inner"
    git("init", "-q", str(inner))
    (inner / ".gitattributes").write_text("* filter=x\n")
    (inner / "part.py").write_text("one\n")
    git("-C", str(inner), "add", ".")
    git("-C", str(inner), "commit", "-qm", "first")
    git("init", "-q")
    git("-c", "protocol.file.allow=always", "submodule", "add", str(inner), "inner")
    (here / "train.py").write_text("one\n")
    git("add", ".")
    git("commit", "-qm", "first")
    git("config", "diff.submodule", "diff")
    git("-C", "inner", "config", "filter.x.clean", str(trap))
    (here / "inner" / "part.py").write_text("changed\n")
    (here / "train.py").write_text("two\n")
    ok("submit", "--site", "local", "--wait", "true")
    assert not (tmp_path / "ran").exists()


def test_a_filter_that_cannot_be_switched_off_is_refused(here: Path) -> None:
    git("init", "-q")
    git("config", "filter.a=b.clean", "true")
    answer = within("submit", "--site", "local", "true")
    assert answer.code != 0
    assert "filter 'a=b', which cannot be switched off" in answer.err
    assert not (here / "runs").exists()


def test_changes_that_are_not_kept_are_named(here: Path) -> None:
    git("init", "-q")
    (here / "data.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (here / "data.txt").write_text("0123456789abcdef\n" * (21 << 16))
    submitted = ok("submit", "--site", "local", "--wait", "true")
    assert "code.patch does not have the changes since the commit" in submitted.err
    assert "more than 20 MiB" in submitted.err
    assert "not kept: the changes" in ok("show", "L1").out
    assert not list(here.glob("runs/true-*/code.patch"))


def test_a_repository_of_another_user_is_named_whose_code_is_not_recorded(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / ".git").mkdir()
    refusing = tmp_path / "git"
    refusing.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership in repository' >&2\nexit 128\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "another user owns the repository" in ok("submit", "--site", "local", "--wait", "true").err
