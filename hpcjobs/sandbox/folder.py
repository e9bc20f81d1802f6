"""The one folder a sandbox lives in: where everything is, who may use it, and its lock."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.site.rehearsal import RECORD

_MARKER = ".hpcjobs-sandbox"


class Folder(NamedTuple):
    """Paths under ``root``."""

    root: Path

    @property
    def record(self) -> Path:
        """What ``hpcjobs.site.rehearsal`` reads; its presence says that ``up`` came to its end."""
        return self.root / RECORD

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def daemons(self) -> Path:
        return self.root / "daemons"

    @property
    def namespaces(self) -> Path:
        return self.root / "ns"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "munge.socket"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def devices(self) -> Path:
        return self.root / "dev"

    @property
    def controller_state(self) -> Path:
        return self.root / "ctld"

    def spool(self, host: str) -> Path:
        return self.root / "nodes" / host / "spool"

    def private(self, host: str, name: str) -> Path:
        """The host's own folder that is mounted over a shared one (``tmp``)."""
        return self.root / "nodes" / host / name

    def is_ours(self) -> bool:
        return (self.root / _MARKER).exists()


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write beside and rename: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
    beside.rename(path)


@contextmanager
def locked(root: Path) -> Iterator[Folder]:
    """Hold the folder (made if need be, and marked as a sandbox's) against a second ``up`` or ``down``.

    Raises:
        RequestError: the folder has content that no sandbox put there.
    """
    folder = Folder(root)
    descriptor = _lock(root)
    try:
        if not folder.is_ours() and any(root.iterdir()):
            raise RequestError(
                f"{root} holds files that no sandbox put there",
                hint="name an empty or new folder with --root",
            )
        (root / _MARKER).touch()
        yield folder
    finally:
        os.close(descriptor)


def _lock(root: Path) -> int:
    """A descriptor holding the lock of the folder that bears the name ``root`` now.

    ``down`` removes the folder while it holds the lock, so who waited for it may have locked a
    folder that is gone: then take the new one.
    """
    while True:
        root.mkdir(parents=True, exist_ok=True, mode=0o755)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(descriptor), root.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
