"""The servers a session can be: how each is started, what it needs, and how to see that it answers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NamedTuple

from hpcjobs.files import write_beside
from hpcjobs.node.session.files import FOLDER, PRIVATE, Kernel, Settings
from hpcjobs.processes.modules import LEAVE_FOLDER, own_module_words
from hpcjobs.processes.start import run

CONFIG = "config"
"""Folder of the configuration that holds the token, in the session's own."""
_EXTENSION = "hpcjobs_session"
_NO_PORT = 8888
"""Jupyter's default: with any other one it refuses to listen at a socket."""
_ASK_S = 5.0


class ServerRequest(NamedTuple):
    """What a server is made from."""

    settings: Settings
    token: str
    run_dir: Path
    private: Path
    """A folder of the node that no other user can enter."""

    @property
    def socket(self) -> str:
        """Where the server is to listen."""
        return str(self.private / "server.socket")


class Server(NamedTuple):
    """What is run, the variables added to its environment, and the page to open."""

    command: list[str]
    environment: dict[str, str]
    path: str


LEAST = {"jupyter_server": 2, "jupyterlab": 3, "notebook": 7}
"""Major versions from which on a session works: older servers know other settings, and do not answer these requests."""
PACKAGES = {
    "lab": ("jupyterlab", "jupyter_server", "ipykernel"),
    "notebook": ("notebook", "jupyter_server", "ipykernel"),
    "code": (),
}
"""What a server of each kind needs of its Python."""


def missing(kind: str) -> str | None:
    """What this Python lacks for a server of ``kind``, and how to get it; None: nothing."""
    if kind == "code":
        return None if shutil.which("code-server") else "no code-server on PATH of the node"
    problems = [problem for name in PACKAGES[kind] if (problem := _problem(name)) is not None]
    if not problems:
        return None
    packages = " ".join(f"'{name}>={LEAST[name]}'" if name in LEAST else name for name in PACKAGES[kind])
    return (
        f"{sys.executable} (Python {sys.version.split()[0]}) has {' and '.join(problems)}: "
        f"{sys.executable} -m pip install {packages}, or name another environment in the site file (jupyter.python)"
    )


def _problem(package: str) -> str | None:
    """``no NAME``, or ``NAME 1.24, not 2 or newer``."""
    if find_spec(package) is None:
        return f"no {package}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return None  # it is there, however it came: the server says what it does not like
    major = installed.partition(".")[0]
    least = LEAST.get(package)
    if least is None or not major.isdigit() or int(major) >= least:
        return None
    return f"{package} {installed}, not {least} or newer"


def jupyter(request: ServerRequest) -> Server:
    """JupyterLab or Notebook: the user's own configuration is read, and what a session needs stands above it.

    Jupyter reads ``JUPYTER_CONFIG_PATH`` before the user's folders, file by file, so ours has the name of each file in
    which a user may set the same thing. Kernels talk over sockets in a private folder: what they print over loopback,
    any user of the node could read.
    """
    settings = request.settings
    home = request.run_dir / FOLDER
    values: dict[str, dict[str, object]] = {
        "IdentityProvider": {"token": request.token},
        "KernelManager": {"transport": "ipc"},
        "ServerApp": {
            "allow_remote_access": True,  # whoever has the token may come by any name
            "allow_root": os.geteuid() == 0,
            "base_url": "/",
            "certfile": "",
            "keyfile": "",
            "jpserver_extensions": {_EXTENSION: True},
            "open_browser": False,
            "port": _NO_PORT,
            "root_dir": settings.folder,
            "sock": request.socket,
            "sock_mode": "0600",
        },
        "LabServerApp": {"extra_labextensions_path": [str(home / "labextensions")]},
    }
    lines = [f"c.{group}.{name} = {value!r}\n" for group, items in values.items() for name, value in items.items()]
    text = f"import sys\nsys.path.insert(0, {str(home)!r})\nc = get_config()\n{''.join(lines)}"
    config = home / CONFIG
    config.mkdir(mode=0o700, exist_ok=True)
    for name in ("jupyter_server_config", "jupyter_lab_config", "jupyter_notebook_config"):
        write_beside(config / f"{name}.py", text)
    _write_kernels(settings.kernels, home / "share" / "kernels", request.private)
    module, path = ("jupyterlab", "/lab") if settings.kind == "lab" else ("notebook", "/tree")
    environment = {
        "JUPYTER_PATH": _before("JUPYTER_PATH", home / "share"),
        "JUPYTER_CONFIG_PATH": _before("JUPYTER_CONFIG_PATH", config),
        "JUPYTER_RUNTIME_DIR": str(request.private),
    }
    if not os.access(os.path.expanduser("~"), os.W_OK):  # as in an image that does not see it
        environment |= {name: str(home / "home") for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    return Server([sys.executable, *own_module_words(module)], environment, path)


def _before(variable: str, folder: Path) -> str:
    """The search path in ``variable`` with ``folder`` ahead of it."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))


def code_server(request: ServerRequest) -> Server:
    """code-server, with the token for its password."""
    config = request.run_dir / FOLDER / "code.yaml"
    values = {"socket": request.socket, "socket-mode": "600", "cert": False, "disable-telemetry": True}
    values |= {"auth": "password", "password": request.token}
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in values.items())  # YAML reads JSON
    write_beside(config, "".join(lines))
    return Server(["code-server", "--config", str(config), "--disable-update-check", request.settings.folder], {}, "/")


def build(request: ServerRequest) -> Server:
    """The server of the settings' kind."""
    return code_server(request) if request.settings.kind == "code" else jupyter(request)


def _write_kernels(kernels: list[Kernel], folder: Path, private: Path) -> None:
    """A kernelspec for each Python that has ipykernel; the others are left out with a word in the log."""
    for number, kernel in enumerate(kernels):
        args = (arg.replace(PRIVATE, str(private)) for arg in kernel.python)
        python = [os.path.expandvars(os.path.expanduser(arg)) for arg in args]
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
        write_beside(place / "kernel.json", json.dumps(spec))


def _has_ipykernel(python: list[str]) -> bool:
    try:
        return run([*python, "-c", f"{LEAVE_FOLDER}; import ipykernel"], timeout_s=120).code == 0
    except (OSError, TimeoutExpired):
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


def ask(where: str, path: str, token: str) -> dict[str, object] | None:
    """What the server at the socket ``where`` says at ``path``, as JSON; None: no answer, or it refuses the token."""
    connection = _SocketConnection(where)
    try:
        connection.request("GET", path, headers={"Authorization": f"token {token}"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            return None
        answer = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else None


def last_activity(kind: str, where: str, token: str) -> float | None:
    """When somebody or a kernel last did something, in seconds since 1970; None: no answer."""
    if kind == "code":
        answer = ask(where, "/healthz", token)
        beat = (answer or {}).get("lastHeartbeat")
        return None if answer is None else float(beat) / 1000 if isinstance(beat, (int, float)) and beat else 0.0
    answer = ask(where, "/hpcjobs/session", token)
    moment = (answer or {}).get("last_activity")
    return float(moment) if isinstance(moment, (int, float)) else None


def answers(kind: str, where: str, token: str) -> bool:
    """Whether the server at the socket ``where`` is ready."""
    return last_activity(kind, where, token) is not None
