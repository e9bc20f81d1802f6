"""A session from the laptop: submitted on the login node by ssh, and reached through OpenSSH."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import signal
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.files import write_beside
from hpcjobs.node.session.files import Connection, Tunnel, is_destination, page
from hpcjobs.ports import find_free_port, is_free
from hpcjobs.processes import programs
from hpcjobs.processes import start as starting
from hpcjobs.processes.programs import run_in_terminal
from hpcjobs.remote.connection import KEEP_ALIVE, LOST, NoConnectionError, read_answer
from hpcjobs.remote.laptop import Laptop
from hpcjobs.site.models import Site

_STOP_S = 5.0
_LONGEST_JSON = 64 << 20
"""Bytes of an answer in JSON; the longest describes the tasks of an array."""
_MOST_STARTS = 100
"""Lines that begin as JSON does, with those that a profile prints."""


class Remote:
    """hpcjobs on the login node; each question is a separate ssh."""

    def __init__(self, login: str, hpcjobs: str) -> None:
        self.login, self._hpcjobs = login, hpcjobs

    def start_tunnel(self, way: Tunnel, port: int) -> Popen[bytes]:
        """The ssh that leads from ``port`` of this machine to a session."""
        ssh, *command = way.command(port)
        return starting.start([ssh, *KEEP_ALIVE, *command])

    def end_tunnel(self, process: Popen[bytes], way: Tunnel, port: int) -> None:
        """End that ssh."""
        process.terminate()
        try:
            process.wait(_STOP_S)
        except TimeoutExpired:
            process.kill()
            process.wait()

    def ask(self, arguments: Sequence[str], *, given: str | None = None) -> dict[str, Any]:
        """The JSON answer to ``arguments``; messages go to the terminal. ``given`` is the standard input.

        Raises HpcJobsError: it failed there, or its answer is not JSON.
        """
        return self._ask(self._command(arguments), given)

    def submit(self, arguments: Sequence[str], *, given: str | None = None) -> dict[str, Any]:
        """As `ask`, of ``arguments`` that submit a session."""
        return self.ask(arguments, given=given)

    def _ask(self, command: Sequence[str], given: str | None) -> dict[str, Any]:
        with programs.start(command, stdin=PIPE, stdout=PIPE) as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:  # a token, short enough for any pipe
                pipe.write((given or "").encode())
            out, *_ = read_answer(process, self.login, longest=_LONGEST_JSON)
        if process.returncode == LOST:
            raise NoConnectionError(f"{self.login} cannot be reached by ssh", hint=self._hint())
        if process.returncode != 0:
            raise HpcJobsError(
                f"{shlex.join(command)}: exit code {process.returncode}",
                hint="jupyter.hpcjobs of the site file says how hpcjobs is called there"
                if process.returncode == 127
                else None,
            )
        return find_json(out.decode("utf-8", "surrogateescape"))

    def _hint(self) -> str:
        return (
            f"does `ssh {self.login}` work without asking? Where it asks for a password or a one-time token, use "
            "`hpcjobs --remote SITE jupyter`: it asks once, and all that follows goes through that connection"
        )

    def show(self, arguments: Sequence[str]) -> int:
        """Run it with this terminal; its exit code."""
        return run_in_terminal(self._command(arguments), stdin=DEVNULL)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return ["ssh", *KEEP_ALIVE, self.login, f"{self._hpcjobs} {shlex.join(arguments)}"]


class SharedRemote(Remote):
    """hpcjobs on the login host of ``--remote``: questions and tunnels go through its one connection."""

    def __init__(self, laptop: Laptop) -> None:
        super().__init__(laptop.connection.destination, "")
        self._laptop = laptop

    def _hint(self) -> str:
        return f"does `ssh {self.login}` work?"

    def start_tunnel(self, way: Tunnel, port: int) -> Popen[bytes]:
        connection = self._laptop.connection
        connection.open()
        shared = shlex.join(["ssh", *connection.options, "-W", "%h:%p", self.login])
        forwarding = ("-o", "ExitOnForwardFailure=yes", "-L", f"{port}:{way.to}")
        if _is_to_node(way):
            return starting.start(["ssh", "-N", *KEEP_ALIVE, "-o", f"ProxyCommand={shared}", *forwarding, *way.host])
        # Not -N: without a command, ssh would leave the forwarding to the shared connection, and end.
        command = way.host[1:] or ("exec cat",)
        return starting.start(["ssh", *connection.options, "-T", *forwarding, self.login, *command], stdin=PIPE)

    def end_tunnel(self, process: Popen[bytes], way: Tunnel, port: int) -> None:
        if process.stdin is not None:
            process.stdin.close()
        super().end_tunnel(process, way, port)
        if not _is_to_node(way):
            self._laptop.connection.cancel_forwarding(f"{port}:{way.to}")

    def submit(self, arguments: Sequence[str], *, given: str | None = None) -> dict[str, Any]:
        """As `ask`, but only once, even if the connection breaks before the answer or the command is typed again."""
        return self._laptop.submit(
            arguments, lambda environment: self._ask(self._command(arguments, environment), given)
        )

    def _command(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        self._laptop.connect(with_code=False)
        return self._laptop.connection.command(self._laptop.script(arguments, environment=environment))


def _is_to_node(way: Tunnel) -> bool:
    """Whether the ssh ends at the node itself, behind the login host."""
    return "-J" in way.options


def find_json(output: str) -> dict[str, Any]:
    """The last JSON object in ``output``: a login node's profile may print lines before and after it.

    Raises HpcJobsError: no JSON object in it.
    """
    decoder = json.JSONDecoder()
    text = f"\n{output}"
    start, most_decoded = len(text), 3 * len(text)
    for _ in range(_MOST_STARTS):
        start = text.rfind("\n{", 0, start) + 1
        if start == 0 or most_decoded < 0:
            break
        try:
            value: dict[str, Any] = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError) as error:
            most_decoded -= (error.pos if isinstance(error, json.JSONDecodeError) else len(text)) - start
        else:
            return value
    raise HpcJobsError(
        f"no answer of hpcjobs in what the login node printed: {output.strip()[-300:]!r}",
        hint="is it the same version there? `hpcjobs jupyter list` on the login node shows what was submitted",
    )


_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""A NUL, and half a character: no argument of a program holds them. Results of a user's program may."""


def _require_usable(part: object) -> None:
    """Refuse such text anywhere in a part of an answer. Raises HpcJobsError: quotes it."""
    left: list[Any] = [part]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += (*value, *value.values())
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and (match := _UNUSABLE.search(value)):
            shown = value[max(0, match.start() - _SHOWN) : match.end()]
            raise HpcJobsError(
                f"the answer of the login host has a NUL or half a character in {shown!r}: not used",
                hint="is hpcjobs of the same version there?",
            )


def read_word(answer: Mapping[str, Any], *keys: str) -> str:
    """The text that ``keys`` lead to in the answer of a login host.

    Raises HpcJobsError: there is none: another version, or a host that lies.
    """
    value: Any = answer
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise HpcJobsError(
            f"the answer of the login host has no {'.'.join(keys)}", hint="is hpcjobs of the same version there?"
        )
    _require_usable(value)
    return value


_ANSWER_S, _LOOK_S = 60.0, 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, an end of the laptop's own, and a closed terminal: each ends the session."""
_JUMP = ("-N", "-J", "HOST")
_SHOWN = 200
Say = Callable[[str], None]


def remote_of(site: Site) -> Remote:
    """The site's login node. Raises RequestError: the site has none."""
    if site.login_host is None:
        raise RequestError(
            f"site {site.name} ({site.path}) has no login host", hint="name it in the site file: login: user@host"
        )
    return Remote(site.login_host.destination, site.jupyter.hpcjobs)


def connect(remote: Remote, arguments: Sequence[str], *, token: str | None, say: Say) -> int:
    """Run ``hpcjobs ARGUMENTS`` (``jupyter ...``) on the site's login node, and stay until Ctrl-C or the session's end.

    A lost link is opened again, for as long as it takes: only Ctrl-C, `hpcjobs jupyter stop` and the time limit
    end the session. ``token`` goes to the login node by standard input. Returns the exit code: not 0 if the session
    could not be ended.

    Raises HpcJobsError: it could not be reached, or the session does not answer.
    """
    if "--dry-run" in arguments:
        return remote.show(arguments)
    for number in _ENDING_SIGNALS:
        signal.signal(number, _interrupt_once)
    job_id, site = None, ""
    stopped = False
    try:
        with _delay_signals():
            answer = remote.submit([*arguments, "--no-wait", "--json"], given=token)
            job_id, site = read_word(answer, "job_id"), read_word(answer, "site")
        _Link(remote, job_id, site, say, at_end="which ends the session too").follow()
    except KeyboardInterrupt:
        if job_id is None:
            raise
    finally:
        if job_id is not None:
            stopped = _stop_session(remote, job_id, site, say)
    return 0 if stopped else HpcJobsError.exit_code


def follow(remote: Remote, arguments: Sequence[str], *, say: Say) -> int:
    """Keep a tunnel to the session of ``hpcjobs ARGUMENTS`` (``jupyter open ...``) until Ctrl-C; the session runs on.

    Raises HpcJobsError: no such session, or it does not answer.
    """
    answer = remote.ask([*arguments, "--json"])
    job_id = read_word(answer, "job_id")
    try:
        _Link(remote, job_id, read_word(answer, "site"), say, at_end="after which the session runs on").follow()
    except KeyboardInterrupt:
        say(f"job {job_id} runs on")
    return 0


def _stop_session(remote: Remote, job_id: str, site: str, say: Say) -> bool:
    """End the session; return whether it has ended, and print the commands that end it if not."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        remote.ask(["jupyter", "stop", job_id, "--site", site, "--json"])
    except HpcJobsError as error:
        state = "runs on" if isinstance(error, NoConnectionError) else "could not be stopped"
        say(f"job {job_id} {state}: {error.message}")
        way, end = (f"`hpcjobs jupyter {verb} {job_id}`" for verb in ("open", "stop"))
        say(f"on the login node: {way} for the way to it, {end} to end it")
        return False
    say(f"job {job_id} is ended")
    return True


def _interrupt_once(number: int, frame: object) -> NoReturn:
    """End the session. Later signals are ignored, also by ssh: a closed terminal sends SIGHUP twice, and the second
    one would interrupt the stop."""
    for each in _ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Delay the signals that end the session until after the block: its ssh must return the job's id first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


class _Link:
    """The tunnel to a session: opened, watched, and opened again when it is lost."""

    def __init__(self, remote: Remote, job_id: str, site: str, say: Say, *, at_end: str) -> None:
        self._remote, self._job_id, self._site, self._say, self._at_end = remote, job_id, site, say, at_end
        self._port = 0
        self._port_taken = False
        self._shown = False
        self._lost = False

    def follow(self) -> None:
        """Keep the tunnel until the session has ended. Raises HpcJobsError: the session never answered."""
        pause_s = _FIRST_PAUSE_S
        with TemporaryDirectory(prefix="hpcjobs-") as folder:
            while True:
                try:
                    if self._open(Path(folder)):
                        pause_s = _FIRST_PAUSE_S
                except NoConnectionError:
                    if not self._shown:
                        raise
                except HpcJobsError:  # it ran, and its message is on the terminal
                    if not self._shown:
                        raise
                    self._say(f"the session of job {self._job_id} has ended")
                    return
                if not self._lost:
                    self._lost = True
                    self._say(f"the connection to {self._remote.login} is lost: it is made anew; the session runs on")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self, folder: Path) -> bool:
        """One tunnel, until it ends; whether the session answered through it."""
        if not self._has_port():
            return False
        answer = self._remote.ask(["jupyter", "open", self._job_id, "--site", self._site, "--json"])
        connection, way = _read_way(answer, self._remote.login)
        tunnel = self._remote.start_tunnel(way, self._port)
        try:
            if not self._await_page(tunnel):
                return False
            self._show(connection, folder)
            tunnel.wait()
            return True
        finally:
            self._remote.end_tunnel(tunnel, way, self._port)

    def _has_port(self) -> bool:
        """Whether the tunnel may listen at its port, which remains the same once the browser knows it.

        Another program at this port must not be mistaken for the session: the browser would send it the token.
        """
        if not self._shown:
            self._port = find_free_port()
        elif not is_free(self._port):
            if not self._port_taken:
                self._say(f"another program listens at port {self._port} of this machine: waiting until it ends")
            self._port_taken = True
            return False
        self._port_taken = False
        return True

    def _await_page(self, tunnel: Popen[bytes]) -> bool:
        """Whether a server answers through the tunnel.

        Raises HpcJobsError: no answer, and none in any earlier tunnel: the address is wrong, not the link.
        """
        end = time.monotonic() + _ANSWER_S
        while not answers(self._port):
            if tunnel.poll() is not None:
                problem = f"ssh ended with exit code {tunnel.returncode}: {shlex.join(map(str, tunnel.args))}"  # type: ignore[arg-type]
            elif time.monotonic() > end:
                problem = f"nothing answers through the tunnel within {_ANSWER_S:g} s"
            else:
                time.sleep(_LOOK_S)
                continue
            if not self._shown:
                raise HpcJobsError(problem)
            return False
        return True

    def _show(self, connection: Connection, folder: Path) -> None:
        if self._lost:
            self._lost = False
            self._say("connected again")
        if self._shown:
            return
        self._shown = True
        address = page(connection, self._port)
        self._say(f"job {self._job_id} on {connection.host}, until Ctrl-C, {self._at_end}")
        self._say(f"open: {address}")
        if connection.kind == "code":
            self._say(f"password: {connection.token}")
        show(address, folder)


def _read_way(answer: Mapping[str, Any], login: str) -> tuple[Connection, Tunnel]:
    """The connection and tunnel in the answer of a login host, which may choose only a node behind it.

    The login host itself is called ``login``, as the user named it: a command in the answer runs on no third host.

    Raises HpcJobsError: a word of it would be an option of ssh, which can run programs here, or is not a host name.
    """
    _require_usable([answer.get("connection"), answer.get("way")])
    try:
        connection, way = Connection(**answer["connection"]), Tunnel(**answer["way"])
        options, target = list(way.options), list(way.host)
        to_node = options[:2] == list(_JUMP[:2]) and len(options) == len(_JUMP)
        usable = (
            (to_node or options in ([], ["-N"]))
            and len(target) in ((1,) if to_node else (1, 2))
            and all(is_destination(host) for host in [*target[:1], *options[2:]])
            and not target[-1].startswith("-")
            and isinstance(way.to, str)
            and connection.path.startswith("/")
        )
    except (AttributeError, KeyError, TypeError):
        usable = False
    if not usable:
        raise HpcJobsError(
            f"the login host names no way to a session that ssh may take: {str(answer.get('way'))[:_SHOWN]!r}",
            hint="is it the same version there?",
        )
    if to_node:
        return connection, Tunnel((*_JUMP[:2], login), way.to, (target[0],))
    return connection, Tunnel(tuple(options), way.to, (login, *target[1:]))


def answers(port: int) -> bool:
    """Whether something at this ``port`` of this machine speaks HTTP; proxies are not used."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True  # a refusal is an answer
    except (OSError, http.client.HTTPException):
        return False
    return True


def show(address: str, folder: Path) -> None:
    """Open the browser with a private file that redirects: every user can read an address on its command line."""
    path = folder / "open.html"
    text = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0;url={escape(address)}"><title>hpcjobs</title>'
    write_beside(path, text, durable=False)
    webbrowser.open(path.as_uri())
