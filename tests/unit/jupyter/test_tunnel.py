"""The ssh line for the laptop, for each way that a site may allow."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpcjobs.node.session.files import Connection, Settings, page, tunnel

RUN_DIR = Path("/shared/it's mine/run")


def settings(**options: object) -> Settings:
    usual = {
        "kind": "lab", "folder": "/shared", "ssh_to_nodes": False,
        "login": "ada@login", "user": "ada", "relay": ["/opt/py thon"], "srun": "/usr/bin/srun", "slurm_conf": None,
        "idle_s": None, "limit_s": None, "warn_s": 300, "token": None, "kernels": [], "in_image": False, "hidden": {},
        "relay_folder": "/run/user/1815/hpcjobs",
    }  # fmt: skip
    return Settings(**{**usual, **options})  # type: ignore[arg-type]


def connection(**options: object) -> Connection:
    usual = {
        "schema": 2, "job_id": "17", "kind": "lab", "host": "n07", "socket": "/tmp/hpcjobs-ab/cd", "port": None,
        "token": "secret", "path": "/lab", "python": "python3", "started": 0.0, "ends": None,
    }  # fmt: skip
    return Connection(**{**usual, **options})  # type: ignore[arg-type]


def ssh_arguments(session_settings: Settings, answering: Connection) -> list[str]:
    way = tunnel(session_settings, answering, RUN_DIR)
    assert way is not None
    command_line = list(way.command(8888))
    assert command_line[0] == "ssh"
    assert "ExitOnForwardFailure=yes" in command_line, "a port that is taken on the laptop is said at once"
    assert "secret" not in " ".join(command_line)
    return [argument for argument in command_line[1:] if argument not in ("-o", "ExitOnForwardFailure=yes")]


def test_where_users_may_ssh_to_their_node_the_port_leads_to_the_socket_there() -> None:
    command_line = ssh_arguments(settings(ssh_to_nodes=True), connection())
    assert command_line == ["-N", "-J", "ada@login", "-L", "8888:/tmp/hpcjobs-ab/cd", "ada@n07"]


def test_where_nobody_may_ssh_to_a_node_the_login_node_runs_a_relay() -> None:
    command_line = ssh_arguments(settings(), connection())
    assert command_line[:3] == ["-L", "8888:/run/user/1815/hpcjobs/17.socket", "ada@login"]
    (remote,) = command_line[3:]
    assert shlex.split(remote) == ["/opt/py thon", f"{RUN_DIR}/session.pyz", "relay", str(RUN_DIR)]


def test_a_session_on_this_machine_needs_no_tunnel_and_one_on_a_box_elsewhere_only_ssh() -> None:
    local = connection(port=41000)
    assert tunnel(settings(login=None, srun=None), local, RUN_DIR) is None
    assert ssh_arguments(settings(srun=None), local) == ["-N", "-L", "8888:127.0.0.1:41000", "ada@login"]


def test_the_address_to_open_holds_the_token_but_for_a_server_that_asks_for_it() -> None:
    assert page(connection(), 8888) == "http://127.0.0.1:8888/lab?token=secret"
    assert page(connection(kind="code", path="/"), 8888) == "http://127.0.0.1:8888/"


@pytest.mark.parametrize("ssh_to_nodes", [True, False])
@pytest.mark.parametrize("name", ["-oProxyCommand=touch ran", "ada@-oProxyCommand=x", "a b", "a'b", "a;touch ran", ""])
def test_a_name_that_is_no_host_is_in_no_command_for_the_laptop(name: str, ssh_to_nodes: bool) -> None:
    with pytest.raises(ValueError, match="is no host that ssh may be called with"):
        tunnel(settings(ssh_to_nodes=ssh_to_nodes, login=name), connection(), RUN_DIR)
    if ssh_to_nodes and name:
        with pytest.raises(ValueError, match="is no host that ssh may be called with"):
            tunnel(settings(ssh_to_nodes=True), connection(host=name), RUN_DIR)


@pytest.mark.parametrize("name", ["ada@login", "ssh://ada@login.example:2222", "ada@[fe80::1%eth0]", "CORP\\ada@login"])
def test_names_that_ssh_takes_for_a_host_are(name: str) -> None:
    assert ssh_arguments(settings(login=name), connection())[2] == name
