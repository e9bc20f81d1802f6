"""The ssh line for the laptop, for each way that a site may allow."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpcjobs.node.session.files import Connection, Settings
from hpcjobs.node.session.tunnel import page, tunnel

RUN_DIR = Path("/shared/it's mine/run")


def settings(**options: object) -> Settings:
    usual = {
        "kind": "lab", "folder": "/shared", "bind": "loopback", "address_suffix": "", "ssh_to_nodes": False,
        "tls": False,
        "login": "ada@login", "user": "ada", "relay": ["/opt/py thon"], "srun": "/usr/bin/srun", "slurm_conf": None,
        "idle_s": None, "limit_s": None, "warn_s": 300, "token": None, "kernels": [], "in_image": False, "hidden": {},
    }  # fmt: skip
    return Settings(**{**usual, **options})  # type: ignore[arg-type]


def connection(**options: object) -> Connection:
    usual = {
        "schema": 1, "job_id": "17", "kind": "lab", "host": "n07", "address": "127.0.0.1", "port": 41000,
        "socket": None, "token": "secret", "path": "/lab", "python": "python3", "started": 0.0, "ends": None,
        "fingerprint": None,
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


def test_a_server_on_the_nodes_address_is_reached_from_the_login_node() -> None:
    request = settings(bind="address", address_suffix="-ib")
    command_line = ssh_arguments(request, connection(address="10.0.0.7"))
    assert command_line == ["-N", "-L", "8888:n07-ib:41000", "ada@login"]


def test_a_server_on_loopback_is_reached_by_an_ssh_to_its_node_through_the_login_node() -> None:
    command_line = ssh_arguments(settings(ssh_to_nodes=True), connection())
    assert command_line == ["-N", "-J", "ada@login", "-L", "8888:localhost:41000", "ada@n07"]


def test_a_server_at_a_socket_is_reached_by_an_ssh_to_its_node() -> None:
    command_line = ssh_arguments(
        settings(ssh_to_nodes=True, bind="socket"), connection(address=None, port=None, socket="/tmp/x/s")
    )
    assert command_line == ["-N", "-J", "ada@login", "-L", "8888:/tmp/x/s", "ada@n07"]


def test_where_nobody_may_ssh_to_a_node_the_login_node_runs_a_relay() -> None:
    command_line = ssh_arguments(settings(), connection())
    assert command_line[:3] == ["-L", "8888:/tmp/hpcjobs-ada/17.socket", "ada@login"]
    (remote,) = command_line[3:]
    assert shlex.split(remote) == ["/opt/py thon", f"{RUN_DIR}/session.pyz", "relay", str(RUN_DIR)]


def test_a_session_on_this_machine_needs_no_tunnel_and_one_on_a_box_elsewhere_only_ssh() -> None:
    assert tunnel(settings(login=None, srun=None), connection(), RUN_DIR) is None
    assert ssh_arguments(settings(srun=None), connection()) == ["-N", "-L", "8888:localhost:41000", "ada@login"]


def test_the_address_to_open_holds_the_token_but_for_a_server_that_asks_for_it() -> None:
    assert page(connection(), 8888) == "http://localhost:8888/lab?token=secret"
    assert page(connection(fingerprint="AB:CD"), 8888) == "https://localhost:8888/lab?token=secret"
    assert page(connection(kind="code", path="/"), 8888) == "http://localhost:8888/"
