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

    A server on the node's address is reached from the login node. One that only the node itself reaches takes an ssh to
    the node or, where that is closed, a step of the job that carries the bytes: then a program on the login node
    listens at a socket that only its owner can open.
    """
    if settings.login is None:
        return None
    if connection.address is not None and settings.bind == "address":
        return Tunnel(("-N",), f"{connection.host}{settings.address_suffix}:{connection.port}", (settings.login,))
    on_node = connection.socket or f"localhost:{connection.port}"
    if settings.srun is None:
        return Tunnel(("-N",), on_node, (settings.login,))
    if settings.ssh_to_nodes:
        return Tunnel(("-N", "-J", settings.login), on_node, (f"{settings.user}@{connection.host}",))
    remote = shlex.join([*settings.relay, str(run_dir / BUNDLE), "relay", str(run_dir)])
    return Tunnel((), relay_socket(settings.user, connection.job_id), (settings.login, remote))


def relay_socket(user: str, job_id: str) -> str:
    """Where the relay of a job listens on the login node: short, for a socket's path has at most 107 bytes."""
    return f"/tmp/hpcjobs-{user}/{job_id}.socket"


def local_port(connection: Connection) -> int:
    """A port to suggest for a laptop whose free ports are not known: that of the node, or one derived from the job."""
    return connection.port or 20000 + sum(map(ord, connection.job_id)) * 131 % 12000


def page(connection: Connection, port: int) -> str:
    """The address to open, once ``port`` of this machine leads to the server. It holds the token: not for a log."""
    query = "" if connection.kind == "code" else f"?token={connection.token}"
    scheme = "http" if connection.fingerprint is None else "https"
    return f"{scheme}://localhost:{port}{connection.path}{query}"
