"""Which commands go to a login host, and with which words; ssh itself is in tests/cluster/remote."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commandline import within
from scripted_slurm import answer

from hpcjobs.cli.fetch import find_target, words_there
from hpcjobs.errors import ConfigError
from hpcjobs.files import config_dir
from hpcjobs.packing import build_wheel, digest_package
from hpcjobs.remote.laptop import _expand_there
from hpcjobs.run.folder import code_files
from hpcjobs.site.library import load_site

PARTITIONS = {"compute": {"nodes": 2, "node": {"cpus": 4}}}
SITE = {"partitions": PARTITIONS, "login": "you@login.example"}


@pytest.fixture
def bare_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without sbatch, with a site file."""
    monkeypatch.setenv("PATH", str(here / "bin"))
    (folder := config_dir() / "site_configs").mkdir(parents=True)
    (folder / "far.yaml").write_text(json.dumps(SITE))
    (folder / "near.yaml").write_text(json.dumps({"partitions": PARTITIONS}))


def destination(remote: str | None = None, site: str | None = None, *, verb: str = "ps") -> str | None:
    target = find_target(remote, site, verb=verb)
    return None if target is None else target.login.destination


def test_a_site_with_a_login_host_is_far_on_a_machine_without_sbatch(bare_path: None, here: Path) -> None:
    assert destination(site="far") == "you@login.example"
    assert destination(site="near") is None
    assert destination(site="local") is None
    assert destination() is None
    assert destination(site="far", verb="sites") is None
    (here / "bin").mkdir()
    (here / "bin" / "sbatch").write_text("#!/bin/sh\n")
    (here / "bin" / "sbatch").chmod(0o755)
    assert destination(site="far") is None
    assert destination("far") == "you@login.example"


def test_the_site_of_the_project_file_is_where_its_jobs_go(bare_path: None, here: Path) -> None:
    (here / "hpcjobs.yaml").write_text("program: train.py\nsite: far\n")
    (here / "train.py").touch()
    answer = within("submit", "--dry-run")
    assert "ssh" in answer.err, answer
    assert within("submit", "--site", "local", "--dry-run").code == 0


def test_a_login_host_of_a_cloned_repository_is_not_talked_to(bare_path: None, here: Path) -> None:
    """Code would be sent to whoever wrote the site file."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "theirs.yaml").write_text(json.dumps(SITE))
    assert destination(site="theirs") is None
    answer = within("--remote", "theirs", "ps")
    assert answer.code == 4
    assert "is not trusted" in answer.err


def test_the_users_default_site_and_variable_count(bare_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_SITE", "far")
    assert destination() == "you@login.example"
    assert destination("no") is None
    monkeypatch.setenv("HPCJOBS_REMOTE", "no")
    assert destination() is None
    monkeypatch.setenv("HPCJOBS_REMOTE", "me@host")
    assert destination() == "me@host"


def test_a_login_host_is_a_name_or_a_section(here: Path) -> None:
    login = {"host": "front", "user": "me", "port": 2222}
    (here / "far.yaml").write_text(json.dumps({**SITE, "login": login}))
    host = load_site("far.yaml").login_host
    assert host is not None
    assert host.destination == "ssh://me@front:2222"
    for wrong in ({"host": "-oProxyCommand=x"}, {"host": "a b"}, {"host": "a", "port": 0}, "-x", {"user": "me"}):
        (here / "far.yaml").write_text(json.dumps({**SITE, "login": wrong}))
        with pytest.raises(ConfigError, match="login"):
            load_site("far.yaml")


def test_remote_names_a_site_with_a_login_host_or_a_host(bare_path: None) -> None:
    answer = within("--remote", "near", "ps")
    assert answer.code == 5
    assert "has no login host" in answer.err
    assert within("--remote", "-oProxyCommand=x", "ps").code == 5
    assert "Traceback" not in answer.err


def test_fetch_without_a_login_host_says_how_to_name_one(bare_path: None) -> None:
    answer = within("fetch", "4711")
    assert answer.code == 5
    assert "use --remote SITE" in answer.err
    assert within("fetch", "--site", "far", "4711", "../secret").code == 5


@pytest.mark.parametrize(
    ("typed", "site", "sent"),
    [
        (["--remote", "x", "submit", "p", "--remote", "y"], None, ["submit", "p", "--remote", "y"]),
        (["--remote=x", "--debug", "ps"], None, ["--debug", "ps"]),
        (["--debug", "--remote", "x", "ps"], None, ["--debug", "ps"]),
        (["submit", "--site", "./far.yaml", "p"], "./far.yaml", ["submit", "--site", "far", "p"]),
        (["submit", "-s./far.yaml", "p", "-s./far.yaml"], "./far.yaml",
         ["submit", "--site=far", "p", "-s./far.yaml"]),
        (["submit", "--site", "far", "p"], "far", ["submit", "--site", "far", "p"]),
    ],
)  # fmt: skip
def test_the_words_for_the_login_host(typed: list[str], site: str | None, sent: list[str]) -> None:
    assert words_there(typed, site) == sent


def test_a_folder_there_expands_variables_and_nothing_else() -> None:
    script = f"HOME=/home/me WORK='/w w'; printf %s {_expand_there('~/x $WORK/${WORK}`id`$(id)')}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "/home/me/x /w w//w w`id`$(id)"
    missing = subprocess.run(["bash", "-c", f"echo {_expand_there('$NOT_THERE/x')}"], capture_output=True, text=True)
    assert "NOT_THERE: is not set on the login host" in missing.stderr


def test_the_code_is_what_git_does_not_ignore_also_in_repositories_within(tmp_path: Path) -> None:
    inner = tmp_path / "top" / "inner"
    inner.mkdir(parents=True)
    for folder in (tmp_path / "top", inner):
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        (folder / ".gitignore").write_text("data\n")
        for name in ("data", "code.py"):
            (folder / name).write_text("x")
    assert sorted(map(str, code_files(tmp_path / "top"))) == [
        ".gitignore", "code.py", "inner/.gitignore", "inner/code.py",
    ]  # fmt: skip


def test_outside_git_run_folders_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".gitignore").write_text("*\n")
    (tmp_path / "runs" / "log").write_text("x")
    (tmp_path / "code.py").write_text("x")
    assert list(map(str, code_files(tmp_path))) == ["code.py"]


def test_the_digest_of_the_package_is_that_of_its_files() -> None:
    assert digest_package() == digest_package()
    assert len(digest_package()) == 64
    assert build_wheel().sha256 == build_wheel().sha256


def test_a_long_message_of_ssh_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    banner = "\n".join(f"line {number} " + "*" * 300 for number in range(40))
    answer(tmp_path, "ssh", f"cat >&2 <<'end'\n{banner}\nssh: the reason\nend\nexit 255")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    failed = within("--remote", "login.example", "ps")
    assert failed.code != 0
    assert "ssh: the reason" in failed.err
    assert (len(failed.err.splitlines()), len(failed.err)) <= (12, 2000), failed
