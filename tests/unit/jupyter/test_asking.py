"""What is asked for, and what is refused before anything is queued."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commandline import ok, within

from hpcjobs.errors import RequestError
from hpcjobs.jupyter.session import private_token
from hpcjobs.node.session.agent import missing

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


@pytest.mark.parametrize("key", ["bind: address", "tls: true"])
def test_a_key_of_earlier_versions_is_refused_with_what_to_do(here: Path, key: str) -> None:
    (here / "old.yaml").write_text(f"scheduler: local\njupyter:\n  {key}\n")
    answer = within("jupyter", "--site", "./old.yaml", "--dry-run")
    assert answer.code == 4
    assert f"old.yaml:3: jupyter.{key.partition(':')[0]}: unknown key" in answer.err
    assert "delete it: a session listens at a socket that only you can open" in answer.err


CLUSTER = {"partitions": {"cpu": {"nodes": 2, "node": {"cpus": 4}}}, "defaults": {"time": "1h"}}


def session_of(here: Path, **fields: object) -> Any:
    """The settings of a session on a cluster with these keys of its site file."""
    (here / "cluster.yaml").write_text(json.dumps(CLUSTER | fields))
    return ok("jupyter", "--site", "./cluster.yaml", "--dry-run", "--json").json["session"]


def test_without_a_login_host_in_the_site_file_a_laptop_is_told_this_hosts_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose full name is localhost where /etc/hosts has it as an alias of 127.0.0.1."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost.localdomain")
    monkeypatch.setattr(socket, "gethostname", lambda: "front1")
    assert session_of(here)["login"].endswith("@front1")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    output = refused("jupyter", "--site", "./cluster.yaml")
    assert "this machine calls itself localhost" in output
    assert "login: user@host" in output
    assert session_of(here, login="front.example")["login"].endswith("@front.example")


def test_a_relay_listens_in_a_folder_that_no_other_user_can_make(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_RUNTIME_DIR where nobody else may write above it, else the user's own state folder; never below /tmp."""
    own = Path.home() / ".local/state/hpcjobs/relay"
    assert session_of(here)["relay_folder"] == str(own)
    with tempfile.TemporaryDirectory(dir="/tmp") as taken:
        monkeypatch.setenv("XDG_RUNTIME_DIR", taken)
        assert session_of(here)["relay_folder"] == str(own)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/nobody-is-logged-in")
    assert session_of(here)["relay_folder"] == str(own)
    if os.getuid() != 0:  # root's folder that nobody else may write to is no use either
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/usr")
        assert session_of(here)["relay_folder"] == str(own)
    if os.access("/run", os.W_OK) and not Path("/run").stat().st_mode & 0o022:
        with tempfile.TemporaryDirectory(dir="/run") as runtime:
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
            assert session_of(here)["relay_folder"] == f"{runtime}/hpcjobs"


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused_before_anything_is_queued(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "cluster.yaml").write_text(json.dumps(CLUSTER | {"login": "front.example", "python": sys.executable}))
    monkeypatch.setenv("XDG_STATE_HOME", f"/home/{'x' * 80}")
    output = refused("jupyter", "--site", "./cluster.yaml")
    assert f"a socket in /home/{'x' * 80}/hpcjobs/relay, and the path of a socket has at most 107 bytes" in output
    assert "set XDG_STATE_HOME to a folder of yours with a shorter name" in output


def test_a_login_host_that_ssh_cannot_be_called_with_is_refused_before_anything_is_queued(here: Path) -> None:
    site = CLUSTER | {"login": "müller@front.example", "python": sys.executable}
    (here / "cluster.yaml").write_text(json.dumps(site))
    output = refused("jupyter", "--site", "./cluster.yaml")
    assert "login host 'müller@front.example': a laptop's ssh cannot be called with it" in output


def test_a_session_ends_by_itself_as_the_site_says_unless_told_otherwise() -> None:
    assert ok(*JUPYTER, "--dry-run", "--json").json["session"]["idle_s"] == 7200
    assert ok(*JUPYTER, "--dry-run", "--json", "--idle", "30m").json["session"]["idle_s"] == 1800
    assert ok(*JUPYTER, "--dry-run", "--json", "--idle", "never").json["session"]["idle_s"] is None


def test_the_advised_installation_names_the_python_as_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcjobs.node.session.agent.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/my code/bin/python")
    assert ": '/my code/bin/python' -m pip install 'jupyterlab>=3'" in str(missing("lab"))


def test_the_hint_for_an_open_token_file_takes_no_name_for_an_option(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    Path("-t").touch(mode=0o644)
    with pytest.raises(RequestError) as open_to_others:
        private_token(Path("-t"))
    assert open_to_others.value.hint == "chmod 600 ./-t"
