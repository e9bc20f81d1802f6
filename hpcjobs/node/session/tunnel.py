"""The way from a laptop to a session, as one ssh command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from hpcjobs.node.session.files import BUNDLE, Connection, Settings

_FAIL_EARLY = ("-o", "ExitOnForwardFailure=yes")


class Tunnel(NamedTuple):
    """The arguments of ssh: options, where the forwarded port leads, and the host (with what runs there)."""

    options: tuple[str, ...]
    to: str
    """``host:port`` or the path of a socket, as the ssh server sees it."""
    host: tuple[str, ...]

    def command(self, local_port: int) -> tuple[str, ...]:
        """The words to type on the laptop; the port is one that is free there."""
        return ("ssh", *self.options, *_FAIL_EARLY, "-L", f"{local_port}:{self.to}", *self.host)


def tunnel(settings: Settings, connection: Connection, run_dir: Path) -> Tunnel | None:
    """The way that the site allows; None: the session runs on the machine its user sits at.

    A socket of a node takes an ssh to the node or, where that is closed, a step of the job that carries the bytes: then
    a program on the login node listens at another socket.
    """
    if settings.login is None:
        return None
    if connection.port is not None:
        return Tunnel(("-N",), f"127.0.0.1:{connection.port}", (settings.login,))
    if settings.ssh_to_nodes:
        return Tunnel(("-N", "-J", settings.login), connection.socket, (f"{settings.user}@{connection.host}",))
    remote = shlex.join([*settings.relay, str(run_dir / BUNDLE), "relay", str(run_dir)])
    return Tunnel((), relay_socket(settings.relay_folder, connection.job_id), (settings.login, remote))


def relay_socket(folder: str, job_id: str) -> str:
    """Where the relay of a job listens on the login node."""
    return f"{folder}/{job_id}.socket"


def local_port(connection: Connection) -> int:
    """The port to open: that of this machine, or one to suggest for a laptop whose free ports are not known."""
    return connection.port or 20000 + sum(map(ord, connection.job_id)) * 131 % 12000


def page(connection: Connection, port: int) -> str:
    """The address to open, once ``port`` of this machine leads to the server. It holds the token: not for a log.

    It is a number, since the name localhost may lead to ::1 first, where another user can listen at the same port.
    """
    query = "" if connection.kind == "code" else f"?token={connection.token}"
    return f"http://127.0.0.1:{port}{connection.path}{query}"
