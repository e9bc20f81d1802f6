"""A freezer (cgroups, version 1) for one sandbox; ``proctrack/cgroup`` tracks a job's processes with it.

All mounts of the freezer on a machine show one tree, and two sandboxes with hosts of the same name would freeze and end
each other's steps. So each sandbox has a separate group, and a cgroup namespace with this group as the root. The
sandbox mounts this root, and its slurmds see only that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from hpcjobs.processes.programs import run
from hpcjobs.sandbox.daemons import must
from hpcjobs.sandbox.folder import Folder, write

_TRIAL = "mount -t cgroup -o freezer freezer /mnt && mkdir /mnt/hpcjobs-$$ && rmdir /mnt/hpcjobs-$$"
# Joins the group $1, keeps a cgroup namespace at $2, and mounts the namespace's view of the freezer on $3.
_OWN_ROOT = 'echo $$ >"$1/cgroup.procs" && exec unshare --cgroup="$2" mount -t cgroup -o freezer freezer "$3"'


def available() -> bool:
    """Whether this machine has a freezer of version 1, and lets us use it; tried in a private mount namespace."""
    return run(["unshare", "--mount", "--propagation", "private", "sh", "-c", _TRIAL]).code == 0


def mount(folder: Folder) -> None:
    """Mount the freezer where ``cgroup.conf`` expects it.

    Raises:
        HpcJobsError: the machine does not allow it.
    """
    freezer = folder.cgroups / "freezer"
    folder.cgroups.mkdir()
    must(["mount", "-t", "tmpfs", "hpcjobs-cgroups", str(folder.cgroups)])
    freezer.mkdir()
    group = _whole_tree(folder) / f"hpcjobs-{secrets.token_hex(4)}"
    write(_name_file(folder), group.name)
    group.mkdir()
    namespace(folder).touch()
    must(["sh", "-c", _OWN_ROOT, "sh", str(group), str(namespace(folder)), str(freezer)])
    must(["umount", str(group.parent)])


def namespace(folder: Folder) -> Path:
    """The file that holds the cgroup namespace; absent where Slurm does not use cgroups."""
    return folder.namespaces / "freezer.cgroup"


def remove(folder: Folder) -> None:
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
