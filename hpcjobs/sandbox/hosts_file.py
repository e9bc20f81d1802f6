"""The sandbox's lines in /etc/hosts: put in as one marked block, taken out again to the byte."""

from __future__ import annotations

import errno
from pathlib import Path

from hpcjobs.sandbox.folder import Folder

HOSTS_FILE = Path("/etc/hosts")


def host_lines(names: dict[str, str]) -> str:
    """Lines for ``names`` (name -> address), each address in both spellings.

    A socket that speaks IPv6 looks up the mapped address, and waits long when no name is known for it.
    """
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for name, address in names.items())


def add_block(folder: Folder, names: dict[str, str], *, path: Path = HOSTS_FILE) -> None:
    """Put our block first: whatever ends the file, with or without a newline, is left as it is."""
    remove_block(folder, path=path)
    begin, end = _markers(folder)
    before = path.read_bytes() if path.exists() else b""
    _replace(path, begin + host_lines(names).encode() + end + before)


def remove_block(folder: Folder, *, path: Path = HOSTS_FILE) -> None:
    """Take every block of this folder's sandbox out; nothing else changes."""
    while has_block(folder, path=path):
        begin, end = _markers(folder)
        ahead, _, rest = path.read_bytes().partition(begin)
        _replace(path, ahead + rest.partition(end)[2])


def has_block(folder: Folder, *, path: Path = HOSTS_FILE) -> bool:
    """Whether a whole block of this folder's sandbox stands there."""
    begin, end = _markers(folder)
    text = path.read_bytes() if path.exists() else b""
    return end in text.partition(begin)[2]


def _markers(folder: Folder) -> tuple[bytes, bytes]:
    return (
        f"# BEGIN hpcjobs sandbox {folder.root}\n".encode(),
        f"# END hpcjobs sandbox {folder.root}\n".encode(),
    )


def _replace(path: Path, content: bytes) -> None:
    """By rename where that goes; in a container /etc/hosts is a mount, which can only be written."""
    beside = path.with_name(f".{path.name}.hpcjobs")
    beside.write_bytes(content)
    if path.exists():
        beside.chmod(path.stat().st_mode & 0o777)
    try:
        beside.rename(path)
    except OSError as error:
        beside.unlink()
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        path.write_bytes(content)
