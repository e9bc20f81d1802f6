"""The one folder a sandbox lives in, its lock, and its daemons, which outlive the command that starts them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.errors import CommandMissingError, HpcJobsError, RequestError
from hpcjobs.files import write_beside
from hpcjobs.processes.programs import run
from hpcjobs.processes.start import start_daemon
from hpcjobs.processes.tree import start_ticks
from hpcjobs.site.machine import RECORD, sandbox_root

_MARKER = ".hpcjobs-sandbox"
_LONGEST = 48
"""Characters of the root's path: sockets are below the root, and a socket's path has at most 107 bytes."""
_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")


class Folder(NamedTuple):
    """Paths under ``root``."""

    root: Path

    @property
    def record(self) -> Path:
        """File for ``hpcjobs.site.machine``; it exists once ``up`` has completed."""
        return self.root / RECORD

    @property
    def state(self) -> Path:
        """The ``Sandbox`` value."""
        return self.root / "state.json"

    @property
    def etc(self) -> Path:
        """Slurm's configuration files."""
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        """SLURM_CONF."""
        return self.etc / "slurm.conf"

    @property
    def task_prolog(self) -> Path:
        """Slurm's prolog of every task, run as the task's user."""
        return self.etc / "task_prolog"

    @property
    def modulefiles(self) -> Path:
        """Modulefiles for ``module load`` on the hosts."""
        return self.root / "modulefiles"

    @property
    def log(self) -> Path:
        """One log for each daemon."""
        return self.root / "log"

    @property
    def daemons(self) -> Path:
        """One record for each daemon."""
        return self.root / "daemons"

    @property
    def namespaces(self) -> Path:
        """Mount points of namespaces."""
        return self.root / "ns"

    @property
    def munge(self) -> Path:
        """Key and socket of the sandbox's munged."""
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        """Socket of munged."""
        return self.munge / "munge.socket"

    @property
    def database(self) -> Path:
        """MariaDB's data: a tmpfs."""
        return self.root / "db"

    @property
    def devices(self) -> Path:
        """Device files that play GPUs."""
        return self.root / "dev"

    @property
    def cgroups(self) -> Path:
        """Mount point of the freezer, where jobs are known by cgroups."""
        return self.root / "cgroup"

    @property
    def controller(self) -> Path:
        """slurmctld's state."""
        return self.root / "ctld"

    def node(self, host: str) -> Path:
        """One host's own folders: spool, /tmp, /var/tmp."""
        return self.root / "nodes" / host

    def hosts(self) -> list[str]:
        """Hosts that were started."""
        return [path.name for path in (self.root / "nodes").glob("*")]

    def is_ours(self) -> bool:
        """Whether a sandbox of this user or of root made this folder: records of another user name any process."""
        try:
            return (self.root / _MARKER).lstat().st_uid in (0, os.geteuid())
        except FileNotFoundError:
            return False

    def clear(self) -> None:
        """Empty the folder except for its mark, so that new daemons find no old files."""
        for entry in self.root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _MARKER:
                entry.unlink()

    def remove(self) -> None:
        """The folder and all that is in it."""
        self.clear()
        (self.root / _MARKER).unlink(missing_ok=True)
        self.root.rmdir()


def folder_at(root: Path | None) -> Folder:
    """The sandbox's folder: ``root``, or the default one."""
    return Folder((root or sandbox_root()).expanduser().resolve())


def check_usable(folder: Folder) -> None:
    """Refuse a path that Slurm or a host could not use (RequestError)."""
    path = folder.root
    if not re.fullmatch(r"/[\w./+-]+", str(path), re.ASCII) or len(str(path)) > _LONGEST:
        raise RequestError(f"{path}: the sandbox's folder has at most {_LONGEST} plain letters, and no blanks")
    if any(path.is_relative_to(shared) for shared in _PRIVATE):
        raise RequestError(f"{path}: each host of a sandbox has {', '.join(_PRIVATE)} for itself")


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file that daemons read, in one step; a sandbox does not outlive a crash of the machine."""
    write_beside(path, text, mode=mode, durable=False)


@contextmanager
def lock(folder: Folder) -> Iterator[None]:
    """Hold the folder (made if need be, and marked as a sandbox's) against a second ``up`` or ``down``.

    Create files that all users can read, whatever the caller's umask: their jobs need them.

    Raises RequestError: the folder has content that no sandbox put there.
    """
    descriptor = _lock(folder.root)
    umask = os.umask(0o022)
    try:
        if not folder.is_ours() and any(folder.root.iterdir()):
            raise RequestError(
                f"{folder.root} holds files that no sandbox put there",
                hint="name an empty or new folder with --root",
            )
        (folder.root / _MARKER).touch()
        folder.root.chmod(0o755)
        yield
    finally:
        os.close(descriptor)
        os.umask(umask)


def _lock(root: Path) -> int:
    """A descriptor holding the lock of the folder that bears the name ``root`` now.

    ``down`` removes the folder while it holds the lock, so who waited for it may have locked a
    folder that is gone: then take the new one.
    """
    while True:
        root.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), root.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


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

    Raises HpcJobsError: it failed; with its output.
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

    Raises HpcJobsError: the awaited state, and the last lines of the failed daemon's log.
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
