"""The servers a session can be: how each is started, what it must find, and how it is asked whether it lives."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpcjobs.runtime.session.files import FOLDER, PRIVATE, Kernel, Settings, write_private

_EXTENSION = "hpcjobs_session"
_ASK_S = 5.0


class Place(NamedTuple):
    """Where a server listens: an address and a port, or a socket's path."""

    address: str | None
    port: int | None
    socket: str | None


class Asked(NamedTuple):
    """What a server is made from."""

    settings: Settings
    place: Place
    token: str
    run_dir: Path
    private: Path
    """A folder of the node's own that nobody else enters."""


class Server(NamedTuple):
    """What is run, the variables added to its environment, and the page to open."""

    command: list[str]
    environment: dict[str, str]
    path: str


def missing(kind: str) -> str | None:
    """What this Python lacks for a server of ``kind``, and how to get it; None: nothing."""
    if kind == "code":
        return None if shutil.which("code-server") else "no code-server on PATH of the node"
    wanted = {"lab": "jupyterlab", "notebook": "notebook"}[kind]
    absent = [name for name in (wanted, "jupyter_server", "ipykernel") if find_spec(name) is None]
    if not absent:
        return None
    return (
        f"{sys.executable} (Python {sys.version.split()[0]}) has no {' and no '.join(absent)}: "
        f"{sys.executable} -m pip install {wanted} ipykernel, or name another environment in the site file"
    )


def jupyter(asked: Asked) -> Server:
    """JupyterLab or Notebook, configured by a file of its own, which wins over the user's.

    Kernels talk over sockets in a private folder: what they print over loopback, any user of the node could read.
    """
    settings, place = asked.settings, asked.place
    home = asked.run_dir / FOLDER
    said: dict[str, dict[str, object]] = {
        "IdentityProvider": {"token": asked.token},
        "KernelManager": {"transport": "ipc"},
        "ServerApp": {
            "allow_remote_access": True,  # whoever has the token may come by any name of the node
            "allow_root": os.geteuid() == 0,
            "jpserver_extensions": {_EXTENSION: True},
            "open_browser": False,
            "port_retries": 0,  # the port is held for it
            "root_dir": settings.folder,
            **(
                {"sock": place.socket, "sock_mode": "0600"}
                if place.socket
                else {"ip": place.address, "port": place.port, "sock": ""}
            ),
        },
        "LabServerApp": {"extra_labextensions_path": [str(home / "labextensions")]},
    }
    lines = [f"c.{group}.{name} = {value!r}\n" for group, values in said.items() for name, value in values.items()]
    write_private(
        home / "config.py", f"import sys\nsys.path.insert(0, {str(home)!r})\nc = get_config()\n{''.join(lines)}"
    )
    _write_kernels(settings.kernels, home / "share" / "kernels", asked.private)
    module, path = ("jupyterlab", "/lab") if settings.kind == "lab" else ("notebook", "/tree")
    known = os.environ.get("JUPYTER_PATH")
    environment = {
        "JUPYTER_PATH": os.pathsep.join(filter(None, (str(home / "share"), known))),
        "JUPYTER_RUNTIME_DIR": str(asked.private),
    }
    if not os.access(os.path.expanduser("~"), os.W_OK):  # as in an image that does not see it
        environment |= {name: str(home / "home") for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    return Server([sys.executable, "-m", module, f"--config={home / 'config.py'}"], environment, path)


def code_server(asked: Asked) -> Server:
    """code-server, with the token for its password."""
    place = asked.place
    config = asked.run_dir / FOLDER / "code.yaml"
    listen = (
        {"socket": place.socket, "socket-mode": "600"}
        if place.socket
        else {"bind-addr": f"{place.address}:{place.port}"}
    )
    said = {**listen, "auth": "password", "password": asked.token, "cert": False, "disable-telemetry": True}
    write_private(config, "".join(f"{name}: {json.dumps(value)}\n" for name, value in said.items()))  # YAML reads JSON
    return Server(["code-server", "--config", str(config), "--disable-update-check", asked.settings.folder], {}, "/")


def build(asked: Asked) -> Server:
    """The server of the settings' kind."""
    return code_server(asked) if asked.settings.kind == "code" else jupyter(asked)


def _write_kernels(kernels: list[Kernel], folder: Path, private: Path) -> None:
    """A kernelspec for each Python that has ipykernel; the others are left out with a word in the log."""
    for number, kernel in enumerate(kernels):
        words = (word.replace(PRIVATE, str(private)) for word in kernel.python)
        python = [os.path.expandvars(os.path.expanduser(word)) for word in words]
        if not _has_ipykernel(python):
            print(f"hpcjobs: no kernel {kernel.name}: {' '.join(python)} has no ipykernel", flush=True)
            continue
        spec: dict[str, object] = {
            "argv": [*python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": kernel.name,
            "language": "python",
        }
        if len(python) == 1:
            spec["env"] = {"PATH": os.pathsep.join((os.path.dirname(python[0]), os.environ.get("PATH", os.defpath)))}
        place = folder / f"hpcjobs-{number}"
        place.mkdir(parents=True, exist_ok=True)
        write_private(place / "kernel.json", json.dumps(spec))


def _has_ipykernel(python: list[str]) -> bool:
    try:
        return subprocess.run([*python, "-c", "import ipykernel"], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket that is a file."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ASK_S)
        self.sock.connect(self._path)


def ask(place: Place, path: str, token: str) -> dict[str, object] | None:
    """What the server says at ``path``, as JSON; None: it does not answer, or does not know the token."""
    connection = (
        _SocketConnection(place.socket)
        if place.socket
        else http.client.HTTPConnection(place.address or "", place.port, timeout=_ASK_S)
    )
    try:
        connection.request("GET", path, headers={"Authorization": f"token {token}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            return None
        found = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) else None


def last_activity(kind: str, place: Place, token: str) -> float | None:
    """When somebody or a kernel last did something, in seconds since 1970; None: no answer."""
    if kind == "code":
        told = ask(place, "/healthz", token)
        beat = (told or {}).get("lastHeartbeat")
        return None if told is None else float(beat) / 1000 if isinstance(beat, (int, float)) and beat else 0.0
    told = ask(place, "/hpcjobs/session", token)
    moment = (told or {}).get("last_activity")
    return float(moment) if isinstance(moment, (int, float)) else None


def answers(kind: str, place: Place, token: str) -> bool:
    """Whether the server is ready, and ours."""
    return last_activity(kind, place, token) is not None
