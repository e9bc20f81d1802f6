"""Hosts out of namespaces: a bridge, and for each host its own network, name and lines in /etc/hosts.

A namespace is held by a bind mount of its file under the sandbox's folder, as ``ip netns`` does
under /run: it lives without a process in it, and its inode says which processes belong to it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.process import run
from hpcjobs.sandbox.daemons import program
from hpcjobs.sandbox.folder import Folder, write
from hpcjobs.sandbox.models import Host, Layout

BRIDGE = "hpcjobs0"
CONTROLLER = "10.78.0.1"
HEAD = "login"
"""Namespace of the controller's side; no host of a site is called so."""
_HOSTS_FILE = Path("/etc/hosts")


def must(argv: Sequence[str]) -> str:
    """Output of a command that has to succeed."""
    done = run([program(argv[0]), *argv[1:]])
    if done.code != 0:
        raise HpcJobsError(f"{' '.join(argv)}: exit code {done.code}\n{(done.err or done.out).strip()}")
    return done.out


def bridge_owner() -> str | None:
    """Root folder of the sandbox whose bridge is up; ``""``: a bridge that does not say."""
    try:
        return Path(f"/sys/class/net/{BRIDGE}/ifalias").read_text().strip()
    except OSError:
        return None


def check_free(folder: Folder) -> None:
    """Refuse a second sandbox, and a machine that has our addresses on a network of its own."""
    owner = bridge_owner()
    if owner not in (None, "", str(folder.root)):
        raise RequestError(
            f"a sandbox is up in {owner}; a machine has one at a time",
            hint=f"hpcjobs sandbox down --root {owner}",
        )
    if owner is None and (used := must(["ip", "-4", "route", "show", "to", "root", "10.78.0.0/24"]).strip()):
        raise RequestError(f"the sandbox's addresses, 10.78.0.0/24, are in use here: {used}")


def build(folder: Folder, layout: Layout) -> None:
    """Bridge, namespaces, addresses and names for every host."""
    must(["ip", "link", "add", BRIDGE, "type", "bridge"])
    must(["ip", "link", "set", BRIDGE, "alias", str(folder.root), "up"])
    must(["ip", "address", "add", f"{CONTROLLER}/24", "dev", BRIDGE])
    add_host_lines(folder, layout)
    head = _namespace_file(folder, f"{HEAD}.uts")
    must(["unshare", f"--uts={head}", "hostname", layout.login])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: _connect(folder, pair[1], index=pair[0]), enumerate(layout.hosts)))


def _connect(folder: Folder, host: Host, *, index: int) -> None:
    net, uts = _namespace_file(folder, f"{host.name}.net"), _namespace_file(folder, f"{host.name}.uts")
    must(["unshare", f"--net={net}", f"--uts={uts}", "hostname", host.name])
    port = f"hpcjobs-n{index + 1}"
    must(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(net)])
    must(["ip", "link", "set", port, "master", BRIDGE, "up"])
    inside = folder.etc / f"{host.name}.ip"
    write(inside, f"link set lo up\naddress add {host.address}/24 dev eth0\nlink set eth0 up\n")
    must(["nsenter", f"--net={net}", program("ip"), "-batch", str(inside)])


def _namespace_file(folder: Folder, name: str) -> Path:
    path = folder.namespaces / name
    path.touch()
    return path


def enter(folder: Folder, host: Host | None = None) -> list[str]:
    """Words before a command that is to run on ``host``, or on the controller's side."""
    words = [program("nsenter"), f"--wd={folder.root}"]
    if host is None:
        return [*words, f"--uts={folder.namespaces / HEAD}.uts", "--"]
    names = folder.namespaces / host.name
    return [*words, f"--net={names}.net", f"--uts={names}.uts", "--"]


def remove(folder: Folder) -> None:
    """The bridge and the names; whoever may still be in a namespace keeps no way out."""
    if bridge_owner() in ("", str(folder.root)):
        run([program("ip"), "link", "delete", BRIDGE])
    for port in Path("/sys/class/net").glob("hpcjobs-n*"):
        run([program("ip"), "link", "delete", port.name])
    remove_host_lines(folder)


def _markers(folder: Folder) -> tuple[str, str]:
    return f"# BEGIN hpcjobs sandbox {folder.root}\n", f"# END hpcjobs sandbox {folder.root}\n"


def host_lines(layout: Layout) -> str:
    """Each address in both spellings: sockets that speak IPv6 look up the mapped one."""
    pairs = [(CONTROLLER, layout.login), *((host.address, host.name) for host in layout.hosts)]
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in pairs)


def add_host_lines(folder: Folder, layout: Layout) -> None:
    """Put our block first in /etc/hosts: so it can be taken out again to the byte."""
    remove_host_lines(folder)
    begin, end = _markers(folder)
    before = _HOSTS_FILE.read_bytes() if _HOSTS_FILE.exists() else b""
    _replace(_HOSTS_FILE, f"{begin}{host_lines(layout)}{end}".encode() + before)


def remove_host_lines(folder: Folder) -> None:
    begin, end = (marker.encode() for marker in _markers(folder))
    text = _HOSTS_FILE.read_bytes() if _HOSTS_FILE.exists() else b""
    while begin in text and end in text.partition(begin)[2]:
        ahead, _, rest = text.partition(begin)
        text = ahead + rest.partition(end)[2]
        _replace(_HOSTS_FILE, text)


def _replace(path: Path, content: bytes) -> None:
    """By rename where that goes; in a container /etc/hosts is a mount, which only can be written."""
    beside = path.with_name(f".{path.name}.hpcjobs")
    beside.write_bytes(content)
    try:
        os.chmod(beside, path.stat().st_mode & 0o777)
        beside.rename(path)
    except OSError as error:
        beside.unlink()
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        path.write_bytes(content)
