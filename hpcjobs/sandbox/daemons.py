"""Daemons that outlive the command that starts them: started, recorded, watched and known by pid."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from hpcjobs.errors import CommandMissingError, HpcJobsError
from hpcjobs.processes.programs import run
from hpcjobs.processes.start import start_daemon
from hpcjobs.processes.tree import start_ticks
from hpcjobs.sandbox.folder import Folder, write

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("LANG", "LC_ALL", "TZ")
_POLL_S = 0.02
_LOG_LINES = 15


class Daemon(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was started; the start time distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    start_ticks: int
    """Clock ticks from boot to its start."""
    argv: tuple[str, ...]
    log: str


def program(name: str) -> str:
    """Path of a program, looked for in the system folders too: root's PATH may lack /usr/sbin."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}")
    if path is None:
        raise CommandMissingError(f"{name}: not found on PATH", hint="hpcjobs sandbox up --install")
    return path


def must(argv: Sequence[str]) -> str:
    """Output of a command that has to succeed.

    Raises:
        HpcJobsError: it failed; with its output.
    """
    done = run([program(argv[0]), *argv[1:]])
    if done.code != 0:
        output = (done.err or done.out).strip()
        refused = "not permitted" in output or "denied" in output
        hint = "in a container: it needs --privileged, or at least CAP_SYS_ADMIN and CAP_NET_ADMIN" if refused else None
        raise HpcJobsError(f"{' '.join(argv)}: exit code {done.code}\n{output}", hint=hint)
    return done.out


def spawn(folder: Folder, name: str, argv: Sequence[str]) -> Daemon:
    """Start ``argv`` in a new session with output to a log file, and record it at once."""
    log = folder.log / f"{name}.log"
    pid = start_daemon(argv, env=_environment(folder), log=str(log))
    daemon = Daemon(name=name, pid=pid, start_ticks=start_ticks(pid) or 0, argv=tuple(argv), log=str(log))
    write(folder.daemons / f"{name}.json", msgspec.json.encode(daemon).decode())
    return daemon


def _environment(folder: Folder) -> dict[str, str]:
    """A small environment: every job sees the variables of slurmd."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {"PATH": _PATH, "HOME": "/root", "SLURM_CONF": str(folder.slurm_conf), **passed_on}


def recorded_daemons(folder: Folder) -> list[Daemon]:
    """Every daemon that was started, alive or not. A record that cannot be read is passed over."""
    daemons = (_read(file) for file in sorted(folder.daemons.glob("*.json")))
    return [daemon for daemon in daemons if daemon is not None]


def _read(file: Path) -> Daemon | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Daemon)
    except (OSError, msgspec.MsgspecError):
        return None


def alive(daemon: Daemon) -> bool:
    """Whether this very process runs."""
    return daemon.start_ticks != 0 and start_ticks(daemon.pid) == daemon.start_ticks


def until(condition: Callable[[], bool], *, what: str, watch: Iterable[Daemon] = (), timeout_s: float = 60) -> None:
    """Wait until ``condition`` holds, and give up when a daemon in ``watch`` ends or the time is over.

    Raises:
        HpcJobsError: the awaited state, and the last lines of the failed daemon's log.
    """
    daemons = list(watch)
    deadline = time.monotonic() + timeout_s
    while not condition():
        for daemon in daemons:
            if not alive(daemon):
                raise HpcJobsError(f"{daemon.name} ended while waiting for {what}\n{last_lines(daemon)}")
        if time.monotonic() > deadline:
            logs = "\n".join(last_lines(daemon) for daemon in daemons)
            raise HpcJobsError(f"no {what} within {timeout_s:.0f} s\n{logs}".rstrip())
        time.sleep(_POLL_S)


def last_lines(daemon: Daemon) -> str:
    """The end of a daemon's log, each line marked with its name."""
    try:
        lines = Path(daemon.log).read_text(errors="replace").splitlines()
    except OSError:
        lines = ["(no log)"]
    return "\n".join(f"  {daemon.name}: {line}" for line in lines[-_LOG_LINES:])
