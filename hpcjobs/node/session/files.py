"""The files of a session in its run folder, each readable by its owner alone.

session.json              the request, for the node
session.pyz               the code of this package
connection.json           where the server answers, and its token; there only while it answers
port_forwarding_command   the command that a laptop types; there as long
session/                  files of the server: configuration, kernels, extensions
"""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from hpcjobs.files import read_regular, write_beside

SETTINGS, BUNDLE, CONNECTION, COMMAND, FOLDER = (
    "session.json",
    "session.pyz",
    "connection.json",
    "port_forwarding_command",
    "session",
)


SCHEMA = 2
"""Of ``connection.json``; in the first one a server listened at a port."""
PRIVATE = "{private}"
"""Placeholder in a kernel's command for the private folder on the node."""


class Kernel(NamedTuple):
    """A further kernel: its name, and the command of its Python."""

    name: str
    python: list[str]


class Settings(NamedTuple):
    """``session.json``. Times are seconds."""

    kind: str
    """``lab``, ``notebook`` or ``code``."""
    folder: str
    """Root folder of the server's files."""
    ssh_to_nodes: bool
    login: str | None
    """``user@host``; None: the session is on the machine that the user sits at."""
    user: str
    relay: list[str]
    """The login node's Python, before ``session.pyz``."""
    srun: str | None
    """Path of srun there; None: no Slurm."""
    slurm_conf: str | None
    idle_s: float | None
    limit_s: float | None
    warn_s: float
    token: str | None
    """None: made on the node."""
    kernels: list[Kernel]
    in_image: bool
    """Whether the server runs in a container, with another Python than the node's."""
    hidden: dict[str, list[str]]
    """Variables hidden from notebooks: ``prefixes`` and ``names``, without the ``exceptions``."""
    relay_folder: str = ""
    """Folder of the relay's sockets on the login host; no other user can create it."""


class Connection(NamedTuple):
    """``connection.json``: a server that answers. Moments are seconds since 1970."""

    schema: int
    job_id: str
    kind: str
    host: str
    socket: str
    """The server's socket, a file that only its owner can open."""
    port: int | None
    """A port of loopback that leads to the socket, for a session on this machine; None on a cluster."""
    token: str
    path: str
    """Path of the page, with a leading slash."""
    python: str
    """One that runs ``session.pyz`` on that host."""
    started: float
    ends: float | None
    """The time limit; None: no limit."""


def read_settings(run_dir: Path) -> Settings:
    """Read the request of this run folder's session; unknown settings of another version are left out.

    Raises OSError: it cannot be read, or is damaged.
    """
    values = _read(run_dir / SETTINGS)
    try:
        known = {name: value for name, value in values.items() if name in Settings._fields}
        return Settings(**{**known, "kernels": [Kernel(*kernel) for kernel in values["kernels"]]})
    except (AttributeError, LookupError, TypeError) as error:
        raise _damage(run_dir / SETTINGS) from error


def _read(path: Path) -> dict[str, Any]:
    """Raises OSError: it cannot be read, or is no JSON."""
    try:
        values: dict[str, Any] = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise _damage(path) from error
    return values


def _damage(path: Path) -> OSError:
    return OSError(errno.EINVAL, "damaged, or of another version", str(path))


def forget_token(run_dir: Path) -> None:
    """Take a token that the user gave out of the settings: the session has ended, the token may be used elsewhere."""
    try:
        settings = read_settings(run_dir)
    except FileNotFoundError:
        return
    if settings.token is not None:
        write_beside(run_dir / SETTINGS, json.dumps(settings._replace(token=None)._asdict()))


def read_connection(run_dir: Path) -> Connection | None:
    """The session's address; None: not yet, no longer, or of an unknown schema. Raises OSError: it is damaged."""
    try:
        values = _read(run_dir / CONNECTION)
        return Connection(**values) if values["schema"] == SCHEMA else None
    except FileNotFoundError:
        return None
    except (LookupError, TypeError) as error:
        raise _damage(run_dir / CONNECTION) from error


_HOST = re.compile(r"(?!-)(?!.*@-)[\w.@:/%\[\]\\+-]+", re.ASCII)
"""A name may have a user before it, also one of a domain with a backslash."""


def is_destination(text: str) -> bool:
    """Whether ssh can only take ``text`` for a host: an option in its place can run programs."""
    return _HOST.fullmatch(text) is not None


_FAIL_EARLY = ("-o", "ExitOnForwardFailure=yes")


class Tunnel(NamedTuple):
    """The arguments of ssh: options, target of the forwarded port, and the host with its command."""

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

    Raises ValueError: ssh could take the name of the login host or of the node for something else.
    """
    if settings.login is None:
        return None
    node = f"{settings.user}@{connection.host}"
    for name in (settings.login, node) if settings.ssh_to_nodes else (settings.login,):
        if not is_destination(name):
            raise ValueError(f"{name!r} is no host that ssh may be called with: a name has letters, digits and .-_@:")
    if connection.port is not None:
        return Tunnel(("-N",), f"127.0.0.1:{connection.port}", (settings.login,))
    if settings.ssh_to_nodes:
        return Tunnel(("-N", "-J", settings.login), connection.socket, (node,))
    remote = shlex.join([*settings.relay, str(run_dir / BUNDLE), "relay", str(run_dir)])
    return Tunnel((), relay_socket(settings.relay_folder, connection.job_id), (settings.login, remote))


def relay_socket(folder: str, job_id: str) -> str:
    """Socket of a job's relay on the login node."""
    return f"{folder}/{job_id}.socket"


def local_port(connection: Connection) -> int:
    """The port to open: of this machine, or a suggestion for a laptop."""
    return connection.port or 20000 + sum(map(ord, connection.job_id)) * 131 % 12000


def page(connection: Connection, port: int) -> str:
    """The address to open, once ``port`` of this machine leads to the server. It holds the token: not for a log.

    It is a number, since the name localhost may lead to ::1 first, where another user can listen at the same port.
    """
    query = "" if connection.kind == "code" else f"?token={connection.token}"
    return f"http://127.0.0.1:{port}{connection.path}{query}"
