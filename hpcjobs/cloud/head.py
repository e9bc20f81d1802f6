"""The head of a rented cluster, over ssh: the wheel that it waits for, its queue, a first job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcjobs.errors import HpcJobsError
from hpcjobs.processes.programs import Result, Runner, run, run_in_terminal
from hpcjobs.wheel import Wheel

PATIENCE_S = 1800.0
"""Seconds that machines may take to start and install themselves; bootstrap.sh waits as long."""
_PAUSE_S = 5.0
_READY = "test -e .cluster-ready"


class HeadNode:
    """The node that people log in to.

    The cluster's own known_hosts, in its folder, keeps the key that the head showed first: the user's file may know
    another machine by the same address.
    """

    def __init__(
        self, ssh: str, folder: Path, *, runner: Runner = run, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.ssh = ssh
        """The command that logs in, as a person types it."""
        self._folder = folder.absolute()
        self._login = shlex.split(ssh)
        known = f'UserKnownHostsFile="{self._folder / "known_hosts"}"'  # quoted for ssh: a folder may have a space
        self._options = ["-o", known, "-o", "StrictHostKeyChecking=accept-new"]
        self._options += ["-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=30"]
        self._runner = runner
        self._pause = pause

    def run(self, *arguments: str) -> Result:
        """Run a command there, without questions."""
        return self._runner([*self._login[:1], "-o", "BatchMode=yes", *self._options, *self._login[1:], *arguments])

    def deliver(self, wheel: Wheel, say: Callable[[str], None]) -> None:
        """Copy ``wheel`` into the user's home, as soon as the head lets somebody in.

        Raises:
            HpcJobsError: no login succeeds within `PATIENCE_S`; names the command that copies it by hand.
        """
        local, login = str(self._folder / wheel.name), self._login[-1]
        part = f".{wheel.name}.part"
        say(f"waiting for the head, to copy {wheel.name} there")
        copy = ["scp", "-q", "-o", "BatchMode=yes", *self._options, local, f"{login}:{part}"]
        error = self._await(lambda: self._runner(copy)) or self._await(lambda: self.run("mv", part, wheel.name))
        if error is not None:
            raise HpcJobsError(
                f"{wheel.name} was not copied to the head: {error}",
                hint=f"the machines wait for it: scp {shlex.quote(local)} {login}:",
            )

    def run_when_ready(self, arguments: Sequence[str], say: Callable[[str], None]) -> int:
        """Wait until the head has installed itself, run ``arguments`` there with this terminal, return the exit code.

        Raises:
            HpcJobsError: it is not ready within `PATIENCE_S`.
        """
        say("waiting until the head has installed itself")
        error = self._await(lambda: self.run(_READY))
        if error is not None:
            raise HpcJobsError(
                f"the head is not ready after {PATIENCE_S / 60:.0f} minutes: {error}",
                hint=f"{self.ssh} tail /var/log/hpcjobs-bootstrap.log",
            )
        say(shlex.join(arguments))
        argv = [*self._login[:1], *self._options, *self._login[1:], shlex.join(arguments)]
        return run_in_terminal(argv)

    def _await(self, attempt: Callable[[], Result]) -> str | None:
        """Repeat ``attempt`` until it succeeds; the last error when it does not within `PATIENCE_S`."""
        end = time.monotonic() + PATIENCE_S
        while (result := attempt()).code:
            if time.monotonic() > end:
                return result.err.strip() or f"exit code {result.code}"
            self._pause(_PAUSE_S)
        return None
