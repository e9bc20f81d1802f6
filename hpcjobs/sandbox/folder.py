"""The one folder a sandbox lives in: where everything is, who may use it, and its lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.files import write_beside
from hpcjobs.site.rehearsal import RECORD, sandbox_root

_MARKER = ".hpcjobs-sandbox"
_LONGEST = 48
"""Characters of the root's path: sockets are below the root, and a socket's path has at most 107 bytes."""
_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")


class Folder(NamedTuple):
    """Paths under ``root``."""

    root: Path

    @property
    def record(self) -> Path:
        """File for ``hpcjobs.site.rehearsal``; it exists once ``up`` has completed."""
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

    Raises:
        RequestError: the folder has content that no sandbox put there.
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
