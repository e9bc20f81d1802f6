"""A session from the laptop: asked for on the login node by ssh, and reached through OpenSSH."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.runtime.session.files import Connection
from hpcjobs.runtime.session.tunnel import Tunnel, page
from hpcjobs.site.library import default_site, load_site

_ANSWER_S, _LOOK_S, _STOP_S = 60.0, 0.2, 5.0
Say = Callable[[str], None]


def connect(site: str | None, words: Sequence[str], *, say: Say) -> int:
    """Run ``hpcjobs WORDS`` (``jupyter ...``) on the site's login node, and stay until Ctrl-C or the session's end.

    Then the tunnel and the session have ended.

    Raises:
        RequestError: the site has no login node. HpcJobsError: it could not be asked, or the session does not answer.
    """
    where = load_site(site or default_site())
    if where.login is None:
        raise RequestError(f"site {where.name} ({where.path}) has no login host", hint="say it in the site file: login")
    remote = _Remote(where.login, where.jupyter.hpcjobs)
    named = [] if site else ["--site", where.name]  # what is the default here need not be the one there
    with _undisturbed():
        job_id = str(remote.ask([*words, *named, "--no-wait", "--json"])["job_id"])
    tunnel: subprocess.Popen[bytes] | None = None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the terminal is closed: as by Ctrl-C
    try:
        told = remote.ask(["jupyter", "open", job_id, "--site", where.name, "--json"])
        connection = Connection(**told["connection"])
        port = free_port()
        tunnel = subprocess.Popen(Tunnel(**told["way"]).command(port), stdin=subprocess.DEVNULL)
        _await_page(tunnel, port)
        address = page(connection, port)
        say(f"job {job_id} on {connection.host}: http://localhost:{port} until Ctrl-C, which ends the session too")
        with TemporaryDirectory(prefix="hpcjobs-") as folder:
            show(address, Path(folder))
            tunnel.wait()
        say("the tunnel has ended")
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        if tunnel is not None:
            _end(tunnel)
        with _undisturbed():
            remote.ask(["jupyter", "stop", job_id, "--site", where.name, "--json"])
        say(f"job {job_id} is ended")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits: a job that was submitted, or is being stopped, must not be forgotten half-way."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Remote:
    """hpcjobs on the login node."""

    def __init__(self, login: str, hpcjobs: str) -> None:
        self._login, self._hpcjobs = login, hpcjobs

    def ask(self, words: Sequence[str]) -> dict[str, Any]:
        """The JSON it answers with; what it says meanwhile goes to the terminal."""
        command = ["ssh", self._login, f"{self._hpcjobs} {shlex.join(words)}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise HpcJobsError(
                f"{shlex.join(command)}: exit code {done.returncode}",
                hint="jupyter.hpcjobs of the site file says how hpcjobs is called there"
                if done.returncode == 127
                else None,
            )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_page(tunnel: subprocess.Popen[bytes], port: int) -> None:
    """Until something answers at the other end."""
    deadline = time.monotonic() + _ANSWER_S
    while not _answers(port):
        if tunnel.poll() is not None:
            raise HpcJobsError(f"ssh ended with exit code {tunnel.returncode}: {shlex.join(map(str, tunnel.args))}")  # type: ignore[arg-type]
        if time.monotonic() > deadline:
            raise HpcJobsError(f"nothing answers through the tunnel within {_ANSWER_S:g} s")
        time.sleep(_LOOK_S)


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True  # a refusal is an answer
    except OSError:
        return False
    return True


def show(address: str, folder: Path) -> None:
    """Open the browser by a private file that leads on: an address on its command line could be seen by everybody."""
    path = folder / "open.html"
    text = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0;url={escape(address)}"><title>hpcjobs</title>'
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    webbrowser.open(path.as_uri())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
