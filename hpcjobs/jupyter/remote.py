"""hpcjobs on the login node, run from the laptop by ssh."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from subprocess import DEVNULL
from typing import Any

from hpcjobs.errors import HpcJobsError
from hpcjobs.processes.programs import run_in_terminal
from hpcjobs.processes.start import run

_NO_CONNECTION = 255
"""Exit code of an ssh that did not reach the other side, or lost it."""
KEEP_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=20")
"""A link that is silent for 45 s is lost; a host that does not answer is tried again after 20 s."""


class NoConnectionError(HpcJobsError):
    """The login node is out of reach, for now."""


class Remote:
    """hpcjobs on the login node."""

    def __init__(self, login: str, hpcjobs: str) -> None:
        self.login, self._hpcjobs = login, hpcjobs

    def ask(self, words: Sequence[str], *, given: str | None = None) -> dict[str, Any]:
        """The JSON it answers with; its messages go to the terminal. ``given`` is its standard input.

        Raises:
            HpcJobsError: it failed there, or answered with something else.
        """
        command = self._command(words)
        result = run(command, given=given or "", show_errors=True)
        if result.code == _NO_CONNECTION:
            raise NoConnectionError(f"{self.login} cannot be reached by ssh", hint=f"does `ssh {self.login}` work?")
        if result.code != 0:
            raise HpcJobsError(
                f"{shlex.join(command)}: exit code {result.code}",
                hint="jupyter.hpcjobs of the site file says how hpcjobs is called there"
                if result.code == 127
                else None,
            )
        return find_json(result.out)

    def show(self, words: Sequence[str]) -> int:
        """Run it with this terminal; its exit code."""
        return run_in_terminal(self._command(words), stdin=DEVNULL)

    def _command(self, words: Sequence[str]) -> list[str]:
        return ["ssh", *KEEP_ALIVE, self.login, f"{self._hpcjobs} {shlex.join(words)}"]


def find_json(output: str) -> dict[str, Any]:
    """The JSON object in ``output``: a login node's profile may print lines before and after it.

    Raises:
        HpcJobsError: there is none.
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
