"""Makes hosts from namespaces: a network and a host name for each, one bridge, and a freezer that tracks their jobs.

A bind mount of its file under the sandbox's folder keeps a namespace, as ``ip netns`` does under /run: the namespace
stays without a process in it, and the inode of the file identifies its processes.

All mounts of the freezer on a machine show one tree, and two sandboxes with hosts of the same name would freeze and end
each other's steps. So each sandbox has a separate group, and a cgroup namespace with this group as the root. The
sandbox mounts this root, and its slurmds see only that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpcjobs.errors import CommandMissingError, RequestError
from hpcjobs.ports import is_free
from hpcjobs.processes.programs import run
from hpcjobs.sandbox.folder import Folder, must, program, write
from hpcjobs.sandbox.layout import Host, Layout

_TRIAL = "mount -t cgroup -o freezer freezer /mnt && mkdir /mnt/hpcjobs-$$ && rmdir /mnt/hpcjobs-$$"
# Joins the group $1, keeps a cgroup namespace at $2, and mounts the namespace's view of the freezer on $3.
_OWN_ROOT = 'echo $$ >"$1/cgroup.procs" && exec unshare --cgroup="$2" mount -t cgroup -o freezer freezer "$3"'


def freezer_available() -> bool:
    """Whether this machine has a freezer of version 1, and lets us use it; tried in a private mount namespace."""
    return run(["unshare", "--mount", "--propagation", "private", "sh", "-c", _TRIAL]).code == 0


def mount_freezer(folder: Folder) -> None:
    """Mount the freezer where ``cgroup.conf`` expects it.

    Raises HpcJobsError: the machine does not allow it.
    """
    freezer = folder.cgroups / "freezer"
    folder.cgroups.mkdir()
    must(["mount", "-t", "tmpfs", "hpcjobs-cgroups", str(folder.cgroups)])
    freezer.mkdir()
    group = _whole_tree(folder) / f"hpcjobs-{secrets.token_hex(4)}"
    write(_name_file(folder), group.name)
    group.mkdir()
    freezer_namespace(folder).touch()
    must(["sh", "-c", _OWN_ROOT, "sh", str(group), str(freezer_namespace(folder)), str(freezer)])
    must(["umount", str(group.parent)])


def freezer_namespace(folder: Folder) -> Path:
    """The file that holds the cgroup namespace; absent where Slurm does not use cgroups."""
    return folder.namespaces / "freezer.cgroup"


def remove_freezer(folder: Folder) -> None:
    """Remove the groups of slurmd and of the sandbox, once no process is in them; the mounts stay."""
    if not _name_file(folder).exists() or not folder.cgroups.is_mount():
        return
    group = _whole_tree(folder) / _name_file(folder).read_text().strip()
    for path, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):  # a process from outside the sandbox is in the group
            os.rmdir(path)
    must(["umount", str(group.parent)])


def _name_file(folder: Folder) -> Path:
    return folder.etc / "freezer-group"


def _whole_tree(folder: Folder) -> Path:
    """The machine's freezer, mounted for a moment."""
    tree = folder.cgroups / "machine"
    tree.mkdir(exist_ok=True)
    must(["mount", "-t", "cgroup", "-o", "freezer", "freezer", str(tree)])
    return tree


BRIDGE = "hpcjobs0"
SUBNET = "10.78.0.0/24"
CONTROLLER = "10.78.0.1"
_HEAD = "login"
"""Namespace of the controller's side; a host's name ends in a digit."""


def bridge_owner() -> str | None:
    """Root folder of the sandbox that has the bridge; ``""``: a crash left it without a label; None: no bridge."""
    try:
        done = run([program("ip"), "-json", "link", "show", "dev", BRIDGE])
    except CommandMissingError:  # a machine that never had a sandbox
        return None
    links = msgspec.json.decode(done.out or "[]") if done.code == 0 else []
    return next((str(link.get("ifalias", "")) for link in links), None)


def check_free(folder: Folder, *, ports: tuple[int, ...]) -> None:
    """Refuse a second sandbox, and a machine that uses our addresses or ports otherwise.

    Raises RequestError: names the conflict.
    """
    owner = bridge_owner()
    if owner not in (None, "", str(folder.root)):
        raise RequestError(
            f"a sandbox is up in {owner}; a machine has one at a time",
            hint=f"hpcjobs sandbox down --root {shlex.quote(owner)}",
        )
    if owner is None and (used := must(["ip", "-4", "route", "show", "to", "root", SUBNET]).strip()):
        raise RequestError(f"the sandbox's addresses, {SUBNET}, are in use here: {used}")
    for port in ports:
        if owner is None and not is_free(port, ""):
            raise RequestError(f"port {port} is in use here; a sandbox needs {', '.join(map(str, ports))}")


def listening(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0


def build(folder: Folder, layout: Layout) -> None:
    """Bridge, namespaces, addresses and names for every host."""
    must(["ip", "link", "add", BRIDGE, "address", link_address(CONTROLLER), "type", "bridge"])
    must(["ip", "link", "set", BRIDGE, "alias", str(folder.root), "up"])
    must(["ip", "address", "add", f"{CONTROLLER}/24", "dev", BRIDGE])
    add_block(folder, {layout.login: CONTROLLER, **{host.name: host.address for host in layout.hosts}})
    must(["unshare", f"--uts={_namespace(folder, _HEAD, 'uts')}", "hostname", layout.login])
    addresses = [CONTROLLER, *(host.address for host in layout.hosts)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: _connect(folder, pair[1], addresses, index=pair[0]), enumerate(layout.hosts)))
    here = folder.etc / "login.ip"
    write(here, "".join(neighbours(addresses, of=CONTROLLER, device=BRIDGE)))
    must(["ip", "-batch", str(here)])


def link_address(address: str) -> str:
    """The MAC address of whoever has this IPv4 address: a locally administered one that holds it."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def neighbours(addresses: Sequence[str], *, of: str, device: str) -> list[str]:
    """Lines of ``ip -batch`` that tell one host the link addresses of all others.

    The kernel has one table of neighbours for all hosts of the machine, with room for 1024 of those it learns, which 33
    hosts fill (33 times 32). Permanent ones are not counted.
    """
    return [
        f"neighbour replace {address} lladdr {link_address(address)} dev {device} nud permanent\n"
        for address in addresses
        if address != of
    ]


def _connect(folder: Folder, host: Host, addresses: Sequence[str], *, index: int) -> None:
    net, uts = _namespace(folder, host.name, "net"), _namespace(folder, host.name, "uts")
    must(["unshare", f"--net={net}", f"--uts={uts}", "hostname", host.name])
    port = f"hpcjobs-n{index + 1}"
    own = link_address(host.address)
    must(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "address", own, "netns", str(net)])
    must(["ip", "link", "set", port, "master", BRIDGE, "up"])
    inside = folder.etc / f"{host.name}.ip"
    lines = ["link set lo up\n", f"address add {host.address}/24 dev eth0\n", "link set eth0 up\n"]
    write(inside, "".join([*lines, *neighbours(addresses, of=host.address, device="eth0")]))
    must(["nsenter", f"--net={net}", program("ip"), "-batch", str(inside)])


def _namespace(folder: Folder, name: str, kind: str) -> Path:
    path = folder.namespaces / f"{name}.{kind}"
    path.touch()
    return path


def enter(folder: Folder, host: Host | None = None) -> list[str]:
    """Words before a command that is to run on ``host``, or on the controller's side."""
    arguments = [program("nsenter"), f"--wd={folder.root}"]
    if host is None:
        return [*arguments, f"--uts={folder.namespaces / _HEAD}.uts", "--"]
    names = folder.namespaces / host.name
    freezer = [f"--cgroup={freezer_namespace(folder)}"] if freezer_namespace(folder).exists() else []
    return [*arguments, f"--net={names}.net", f"--uts={names}.uts", *freezer, "--"]


def remove(folder: Folder) -> None:
    """The bridge and its ports, if they are ours. Ports come first: the bridge identifies their owner."""
    if bridge_owner() not in ("", str(folder.root)):
        return
    done = run([program("ip"), "-json", "link", "show", "master", BRIDGE])
    for port in msgspec.json.decode(done.out or "[]"):
        run([program("ip"), "link", "delete", port["ifname"]])
    must(["ip", "link", "delete", BRIDGE])


HOSTS_FILE = Path("/etc/hosts")


def host_lines(names: dict[str, str]) -> str:
    """Lines for ``names`` (name -> address), each address in both spellings.

    A socket that speaks IPv6 looks up the mapped address, and waits long when no name is known for it.
    """
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for name, address in names.items())


def add_block(folder: Folder, names: dict[str, str], *, path: Path = HOSTS_FILE) -> None:
    """Put our block first: the end of the file, with or without a newline, is not changed."""
    remove_block(folder, path=path)
    begin, end = _markers(folder)
    before = path.read_bytes() if path.exists() else b""
    _replace(path, begin + host_lines(names).encode() + end + before)


def remove_block(folder: Folder, *, path: Path = HOSTS_FILE) -> None:
    """Remove every block of this folder's sandbox."""
    while has_block(folder, path=path):
        begin, end = _markers(folder)
        ahead, _, rest = path.read_bytes().partition(begin)
        _replace(path, ahead + rest.partition(end)[2])


def has_block(folder: Folder, *, path: Path = HOSTS_FILE) -> bool:
    """Whether the file has a complete block of this folder's sandbox."""
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
