"""A freezer of our own (cgroups, version 1) under the sandbox's folder, by which ``proctrack/cgroup`` knows a job's
processes. All mounts of the freezer on a machine are one tree: what a sandbox leaves in it is removed by name.
"""

from __future__ import annotations

import contextlib
import os

from hpcjobs.process import run
from hpcjobs.sandbox.daemons import must
from hpcjobs.sandbox.folder import Folder

_TRIAL = "mount -t cgroup -o freezer freezer /mnt && mkdir /mnt/hpcjobs-$$ && rmdir /mnt/hpcjobs-$$"


def available() -> bool:
    """Whether this machine has a freezer of version 1, and lets us use it: tried in a mount namespace of its own."""
    return run(["unshare", "--mount", "--propagation", "private", "sh", "-c", _TRIAL]).code == 0


def mount(folder: Folder) -> None:
    """Where ``cgroup.conf`` says.

    Raises:
        HpcJobsError: the machine does not allow it.
    """
    freezer = folder.cgroups / "freezer"
    folder.cgroups.mkdir()
    must(["mount", "-t", "tmpfs", "hpcjobs-cgroups", str(folder.cgroups)])
    freezer.mkdir()
    must(["mount", "-t", "cgroup", "-o", "freezer", "freezer", str(freezer)])


def remove(folder: Folder) -> None:
    """The groups that these hosts' slurmd made, once no process is in them; the mounts stay."""
    for host in folder.hosts():
        for path, _, _ in os.walk(folder.cgroups / "freezer" / f"slurm_{host}", topdown=False):
            with contextlib.suppress(OSError):  # one that a process of somebody else's entered
                os.rmdir(path)
