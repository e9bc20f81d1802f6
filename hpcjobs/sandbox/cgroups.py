"""A freezer of our own (cgroups, version 1) under the sandbox's folder, by which ``proctrack/cgroup`` knows a job's
processes. All mounts of the freezer on a machine are one tree: what a sandbox leaves in it is removed by name.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcjobs.sandbox.daemons import must
from hpcjobs.sandbox.folder import Folder


def available() -> bool:
    """Whether this machine's kernel has the freezer of version 1."""
    try:
        lines = Path("/proc/cgroups").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(line.split()[0] == "freezer" and line.split()[3] == "1" for line in lines)


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
