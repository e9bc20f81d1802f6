"""Runs a session on its node: starts the server, watches it, and cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import NamedTuple

from hpcjobs.files import write_beside
from hpcjobs.node.session import files
from hpcjobs.node.session.files import FOLDER, PRIVATE, Connection, Kernel, Settings
from hpcjobs.processes.start import LEAVE_FOLDER, own_module_words, run, start

_CHUNK = 1 << 16


def listen(path: str) -> int:
    """Listen at a free port until this process ends, and carry each connection to the socket ``path``; the port.

    The port is listened at before anybody learns of it, and was bound without SO_REUSEADDR: so no other user can listen
    there too.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    threading.Thread(target=asyncio.run, args=[_serve(listening, path)], daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


async def _serve(listening: socket.socket, path: str) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(path)
            writers.append(server_writer)
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        except OSError:  # one of both has ended
            pass
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    server = await asyncio.start_server(carry, sock=listening)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To the end of ``reader``: whoever has sent everything may still wait for the answer."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


CONFIG = "config"
"""Folder of the configuration that holds the token, in the session's own."""
_EXTENSION = "hpcjobs_session"
_NO_PORT = 8888
"""Jupyter's default: with any other one it refuses to listen at a socket."""
_ASK_S = 5.0


class ServerRequest(NamedTuple):
    """Input of a server's command."""

    settings: Settings
    token: str
    run_dir: Path
    private: Path
    """A folder of the node that no other user can enter."""

    @property
    def socket(self) -> str:
        """Path of the server's socket."""
        return str(self.private / "server.socket")


class Server(NamedTuple):
    """A server's command, additional variables, and the page to open."""

    command: list[str]
    environment: dict[str, str]
    path: str


LEAST = {"jupyter_server": 2, "jupyterlab": 3, "notebook": 7}
"""Least major versions: older servers have other settings, and do not answer these requests."""
PACKAGES = {
    "lab": ("jupyterlab", "jupyter_server", "ipykernel"),
    "notebook": ("notebook", "jupyter_server", "ipykernel"),
    "code": (),
}
"""Packages that a server of each kind needs."""


def missing(kind: str) -> str | None:
    """The missing packages for a server of ``kind``, and how to install them; None: complete."""
    if kind == "code":
        return None if shutil.which("code-server") else "no code-server on PATH of the node"
    problems = [problem for name in PACKAGES[kind] if (problem := _problem(name)) is not None]
    if not problems:
        return None
    packages = " ".join(f"'{name}>={LEAST[name]}'" if name in LEAST else name for name in PACKAGES[kind])
    return (
        f"{sys.executable} (Python {sys.version.split()[0]}) has {' and '.join(problems)}: "
        f"{shlex.quote(sys.executable)} -m pip install {packages},"
        " or name another environment in the site file (jupyter.python)"
    )


def _problem(package: str) -> str | None:
    """``no NAME``, or ``NAME 1.24, not 2 or newer``."""
    if find_spec(package) is None:
        return f"no {package}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return None  # importable without metadata: the server reports problems
    major = installed.partition(".")[0]
    least = LEAST.get(package)
    if least is None or not major.isdigit() or int(major) >= least:
        return None
    return f"{package} {installed}, not {least} or newer"


def jupyter(request: ServerRequest) -> Server:
    """JupyterLab or Notebook: the user's own configuration is read, and the session's settings override it.

    Jupyter reads ``JUPYTER_CONFIG_PATH`` before the user's folders, file by file. So the session has a file for each
    name of a user's file with the same settings. Kernels use sockets in a private folder: any user of the node could
    read their output over loopback.
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
    """The JSON answer of the server at the socket ``where``; None: no answer, or the token is refused."""
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


MISSING = 20
"""Exit code: the node lacks something the session needs."""
_ANSWER_S = 300.0
_LOOK_S, _LOOK_AGAIN_S = 0.2, 15.0
_STOP_S = 15.0
_LONGEST_PARENT = 40
"""Bytes of the parent of the private folder: a socket's path has at most 107 bytes, and a kernel's socket adds 67:
``/hpcjobs-12345678/kernel-`` and the kernel's id, ``-ipc-1``."""
_LAST_WARNING_S = 60.0
_HEARD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD}


def serve(run_dir: Path) -> int:
    """Run the session of this run folder to its end; the exit code."""
    settings = files.read_settings(run_dir)
    if problem := missing(settings.kind):
        print(f"hpcjobs: {problem}", file=sys.stderr, flush=True)
        return MISSING
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    token = settings.token or secrets.token_urlsafe(32)
    with _private_folder() as private:
        return _Session(settings, run_dir, private, token).run()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of the node's own, for sockets."""
    parent = tempfile.gettempdir()
    fits = len(os.fsencode(parent)) <= _LONGEST_PARENT
    folder = tempfile.mkdtemp(prefix="hpcjobs-", dir=parent if fits else "/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Session:
    """A server, its files, and the clock."""

    def __init__(self, settings: Settings, run_dir: Path, private: Path, token: str) -> None:
        self._settings, self._run_dir, self._token = settings, run_dir, token
        self._request = ServerRequest(settings, token, run_dir, private)
        self._socket = self._request.socket
        self._started = time.time()
        self._ends = _ends(settings, self._started)
        warnings = {settings.warn_s, min(settings.warn_s, _LAST_WARNING_S)}
        self._warnings = sorted(warnings if self._ends is not None else (), reverse=True)
        self._answering = False

    def run(self) -> int:
        home = self._run_dir / files.FOLDER
        home.mkdir(mode=0o700, exist_ok=True)
        self._clear(home)  # of an attempt that lost its node
        server = build(self._request)
        process = start(
            server.command,
            cwd=self._settings.folder,
            env=_environment(self._settings) | server.environment,
            new_session=True,
            prepare=_hear_everything,
        )
        try:
            return self._watch(process, server.path)
        finally:
            _stop(process)
            self._clear(home)
            files.forget_token(self._run_dir)

    def _watch(self, process: Popen[bytes], path: str) -> int:
        """Until the server ends, or is to end."""
        while process.poll() is None:
            heard = signal.sigtimedwait(_HEARD, self._patience_s())
            if heard is not None and heard.si_signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                _say(f"stopped by a signal ({signal.Signals(heard.si_signo).name})")
                return 128 + heard.si_signo
            if heard is not None and heard.si_signo == signal.SIGUSR1:
                self._warn("The job is about to be ended. ")
            if not self._answering:
                self._announce(path)
                if not self._answering and time.time() - self._started > _ANSWER_S:
                    _say(f"the server has not answered for {_ANSWER_S:g} s")
                    return 1
            else:
                self._warn_when_due()
                if self._idle():
                    return 0
        code = process.returncode
        _say(f"the server ended with exit code {code}")
        return 128 - code if code < 0 else code

    def _patience_s(self) -> float:
        """Until something may be due."""
        if not self._answering:
            return _LOOK_S
        due = [_LOOK_AGAIN_S]
        if self._settings.idle_s is not None:
            due.append(self._settings.idle_s / 4)
        if self._ends is not None and self._warnings:
            due.append(self._ends - self._warnings[0] - time.time())
        return max(_LOOK_S, min(due))

    def _announce(self, path: str) -> None:
        """Publish the address once the server answers.

        Its socket gets a new name then. Any user reads the first one in /proc/net/unix, and could listen at it after
        the session's end, where a laptop's tunnel may still lead; the second one is known to its owner alone.
        """
        self._answering = answers(self._settings.kind, self._socket, self._token)
        if not self._answering:
            return
        first, self._socket = self._socket, f"{os.path.dirname(self._socket)}/{secrets.token_hex(16)}"
        os.rename(first, self._socket)
        connection = Connection(
            schema=files.SCHEMA,
            job_id=os.environ["HPCJOBS_JOB_ID"],
            kind=self._settings.kind,
            host=socket.gethostname(),
            socket=self._socket,
            port=listen(self._socket) if self._settings.srun is None else None,
            token=self._token,
            path=path,
            python="python3" if self._settings.in_image else sys.executable,
            started=self._started,
            ends=self._ends,
        )
        try:
            way = files.tunnel(self._settings, connection, self._run_dir)
        except ValueError as error:
            way = None
            _say(f"no command for a laptop: {error}")
        if way is not None:
            arguments = way.command(files.local_port(connection))
            write_beside(self._run_dir / files.COMMAND, shlex.join(arguments) + "\n")
        write_beside(self._run_dir / files.CONNECTION, json.dumps(connection._asdict(), indent=2))
        _say(f"{self._settings.kind} answers on {connection.host}")

    def _warn_when_due(self) -> None:
        while self._ends is not None and self._warnings and time.time() >= self._ends - self._warnings[0]:
            self._warnings.pop(0)
            self._warn("")

    def _idle(self) -> bool:
        """Whether no user and no kernel has done anything for as long as the limit says."""
        idle = self._settings.idle_s
        if idle is None:
            return False
        active = last_activity(self._settings.kind, self._socket, self._token)
        if active is None or time.time() - max(active, self._started) < idle:
            return False
        _say(f"idle for {idle / 60:g} min: the session ends")
        return True

    def _warn(self, why: str) -> None:
        """A note for whoever has the page open; it saves every document that is open there."""
        until = f"Time limit at {time.strftime('%H:%M', time.localtime(self._ends))}. " if self._ends else ""
        text = f"{why}{until}Everything that is open here has been saved."
        write_beside(
            self._run_dir / files.FOLDER / "notice.json",
            json.dumps({"number": time.time_ns() // 1_000_000, "text": text}),
        )
        _say(f"{why}{until}Open documents are saved.")

    def _clear(self, home: Path) -> None:
        """Remove files with the token or the address of an ended server."""
        for path in (self._run_dir / files.CONNECTION, self._run_dir / files.COMMAND):
            path.unlink(missing_ok=True)
        (home / "code.yaml").unlink(missing_ok=True)
        shutil.rmtree(home / CONFIG, ignore_errors=True)


def _ends(settings: Settings, started: float) -> float | None:
    """The time limit, as Slurm gave it to the job's script, or as requested."""
    ends = os.environ.get("HPCJOBS_ENDS", "")
    if ends.isdigit():
        return float(ends)
    return None if settings.limit_s is None else started + settings.limit_s


def _environment(settings: Settings) -> dict[str, str]:
    """The environment of notebooks, without the layout of the job's tasks.

    An srun in a cell would use this layout, and libraries would take the notebook for a training run.
    """
    prefixes, names, exceptions = (settings.hidden[key] for key in ("prefixes", "names", "exceptions"))
    return {
        name: value
        for name, value in os.environ.items()
        if name in exceptions or not (name in names or name.startswith(tuple(prefixes)))
    }


def _hear_everything() -> None:
    """The server and its kernels start with no signal blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stop(process: Popen[bytes]) -> None:
    """End the server, which ends its kernels; then whatever of its session is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except TimeoutExpired:
            _say(f"the server does not end within {_STOP_S:g} s: killed")
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _say(text: str) -> None:
    print(f"hpcjobs: {text}", flush=True)
