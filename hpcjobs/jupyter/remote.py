"""hpcjobs on the login node, run from the laptop by ssh."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from hpcjobs.errors import HpcJobsError
from hpcjobs.node.session.files import Tunnel
from hpcjobs.processes import start as starting
from hpcjobs.processes.programs import run_in_terminal
from hpcjobs.processes.start import run
from hpcjobs.remote.connection import KEEP_ALIVE, LOST, NoConnectionError
from hpcjobs.remote.laptop import Laptop

_STOP_S = 5.0


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

        Raises:
            HpcJobsError: it failed there, or its answer is not JSON.
        """
        return self._ask(self._command(arguments), given)

    def submit(self, arguments: Sequence[str], *, given: str | None = None) -> dict[str, Any]:
        """As `ask`, of ``arguments`` that submit a session."""
        return self.ask(arguments, given=given)

    def _ask(self, command: Sequence[str], given: str | None) -> dict[str, Any]:
        result = run(command, given=given or "", show_errors=True)
        if result.code == LOST:
            raise NoConnectionError(f"{self.login} cannot be reached by ssh", hint=self._hint())
        if result.code != 0:
            raise HpcJobsError(
                f"{shlex.join(command)}: exit code {result.code}",
                hint="jupyter.hpcjobs of the site file says how hpcjobs is called there"
                if result.code == 127
                else None,
            )
        return find_json(result.out)

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
    """The JSON object in ``output``: a login node's profile may print lines before and after it.

    Raises:
        HpcJobsError: no JSON object in it.
    """
    decoder = json.JSONDecoder()
    starts = [0, *(position + 1 for position, letter in enumerate(output) if letter == "\n")]
    for start in starts:
        if output.startswith("{", start):
            try:
                value, _ = decoder.raw_decode(output, start)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    raise HpcJobsError(
        f"no answer of hpcjobs in what the login node printed: {output.strip()[-300:]!r}",
        hint="is it the same version there? `hpcjobs jupyter list` on the login node shows what was submitted",
    )
