"""What is asked for, and what is refused before anything is queued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commandline import ok, within

JUPYTER = ("jupyter", "--site", "local")


def refused(*arguments: str) -> str:
    answer = within(*arguments)
    assert answer.code == 5, answer
    assert not Path("runs").exists()
    return answer.err


def test_a_dry_run_prints_the_script_and_writes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    answer = ok("jupyter", "--site", "gcp-t4", "--dry-run", "-N", "2", "-c", "4", "-t", "2h")
    assert "#SBATCH --nodes=2" in answer.out
    assert "#SBATCH --cpus-per-task=4" in answer.out
    assert "#SBATCH --signal=B:USR1@300" in answer.out
    assert "/session.pyz serve /" in answer.out
    assert list(here.iterdir()) == []


def test_a_token_of_ones_own_is_in_no_command_line_script_or_plan(here: Path) -> None:
    token = "0123456789abcdef-secret"
    file = here / "token"
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    answer = ok(*JUPYTER, "--dry-run", "--json", "--token-file", str(file))
    assert answer.json["session"]["kind"] == "lab"
    assert token not in answer.out


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("0123456789abcdef-secret", 0o644, "can be read by others"),
        ("short", 0o600, "a token is one line of 16"),
        ("0123456789abcdef 0123456789abcdef", 0o600, "a token is one line of 16"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_file_that_holds_no_private_token_is_refused(
    here: Path, content: str | None, mode: int, message: str
) -> None:
    file = here / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    assert message in refused(*JUPYTER, "--token-file", str(file))


def test_what_cannot_be_is_refused_by_name(here: Path) -> None:
    assert "idle 'soon'" in refused(*JUPYTER, "--idle", "soon")
    assert "no such folder" in refused(*JUPYTER, "--dir", "nowhere")
    assert within(*JUPYTER, "--lab", "--code").code == 2
    assert within("jupyter", "stop").code == 6
    assert within("jupyter", "open", "17").code == 6


def test_a_job_that_is_no_session_is_told_so() -> None:
    job_id = ok("submit", "--site", "local", "--json", "true").json["job_id"]
    answer = within("jupyter", "open", job_id)
    assert answer.code == 6
    assert f"job {job_id} is no session" in answer.err
    within("wait", job_id)


def test_a_python_without_jupyter_is_refused_before_anything_is_queued(here: Path) -> None:
    (here / "bare.yaml").write_text(json.dumps({"scheduler": "local", "jupyter": {"python": "/usr/bin/python3"}}))
    output = refused("jupyter", "--site", "./bare.yaml")
    assert "/usr/bin/python3" in output
    assert "has no jupyterlab and no jupyter_server and no ipykernel" in output
    assert "pip install 'jupyterlab>=3' 'jupyter_server>=2' ipykernel" in output


def test_servers_of_an_older_generation_are_refused_before_anything_is_queued(here: Path) -> None:
    """jupyter_server 1 and Notebook 6 know other settings: they start, and never answer as a session asks."""
    packages = here / "packages"
    for name, version in (
        ("jupyterlab", "3.6.1"),
        ("jupyter_server", "1.24.0"),
        ("notebook", "6.5.4"),
        ("ipykernel", "6"),
    ):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    python = here / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (here / "old.yaml").write_text(json.dumps({"scheduler": "local", "jupyter": {"python": str(python)}}))
    assert "has jupyter_server 1.24.0, not 2 or newer" in refused("jupyter", "--site", "./old.yaml")
    output = refused("jupyter", "--site", "./old.yaml", "--notebook")
    assert "notebook 6.5.4, not 7 or newer and jupyter_server 1.24.0, not 2 or newer" in output


def test_a_python_that_is_too_old_is_refused_before_anything_is_queued(here: Path) -> None:
    old = here / "python"
    old.write_text("#!/bin/sh\necho old\n")  # what one answers that is asked for its version
    old.chmod(0o755)
    (here / "old.yaml").write_text(json.dumps({"scheduler": "local", "jupyter": {"python": str(old)}}))
    assert f"{old} is older than Python 3.9" in refused("jupyter", "--site", "./old.yaml")


def test_a_site_says_where_its_sessions_listen(here: Path) -> None:
    fields = {"scheduler": "local", "jupyter": {"bind": "everywhere"}}
    (here / "wrong.yaml").write_text(json.dumps(fields))
    answer = within("jupyter", "--site", "./wrong.yaml", "--dry-run")
    assert answer.code == 4
    assert "everywhere" in answer.err


def test_a_session_ends_by_itself_as_the_site_says_unless_told_otherwise() -> None:
    assert ok(*JUPYTER, "--dry-run", "--json").json["session"]["idle_s"] == 7200
    assert ok(*JUPYTER, "--dry-run", "--json", "--idle", "30m").json["session"]["idle_s"] == 1800
    assert ok(*JUPYTER, "--dry-run", "--json", "--idle", "never").json["session"]["idle_s"] is None
