"""The job's control group, where Slurm makes one: memory in use, its limit, CPU time. Both versions of cgroups."""

import os
import re
from typing import Dict, Optional

_JOB = re.compile(r"(.*/job_\d+)(?:/|$)")
_NO_LIMIT = 1 << 60
"""Version 1 writes a number as large as this for "no limit"."""


class JobGroup:
    """The group of the job that this process is in; every value is None where the kernel does not have it."""

    def __init__(self, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
        self._root = root
        self._memory = _folder(root, own, "memory")
        self._cpu = _folder(root, own, "cpuacct")

    def used_bytes(self) -> Optional[int]:
        """Memory that the kernel cannot simply take back: anonymous and shared pages, without caches of files."""
        stat = _table(self._memory, "memory.stat")
        for names in (("total_rss", "total_shmem"), ("anon", "shmem")):
            if names[0] in stat:
                return stat[names[0]] + stat.get(names[1], 0)
        return None

    def limit_bytes(self) -> Optional[int]:
        """The least limit of the job's group and of all groups that it lies in."""
        limits = []
        folder = self._memory or self._root
        while folder != self._root:
            texts = [_text(folder, name) for name in ("memory.max", "memory.limit_in_bytes")]
            limits += [int(text) for text in texts if text is not None and text.isdigit()]
            folder = os.path.dirname(folder)
        return min((limit for limit in limits if limit < _NO_LIMIT), default=None)

    def cpu_s(self) -> Optional[float]:
        """CPU time of all processes that were ever in the group."""
        usage = _table(self._cpu, "cpu.stat").get("usage_usec")
        if usage is not None:
            return usage / 1e6
        text = _text(self._cpu, "cpuacct.usage")
        return int(text) / 1e9 if text is not None and text.isdigit() else None


def _folder(root: str, own: str, controller: str) -> Optional[str]:
    """Where the job's group is mounted: the ``job_N`` above this process."""
    try:
        with open(own) as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        match = _JOB.match(path)
        if match is None or (controllers and controller not in controllers.split(",")):
            continue
        candidates = [root + match.group(1)] if not controllers else [
            os.path.join(root, name) + match.group(1) for name in (controllers, controller)
        ]  # fmt: skip
        for candidate in candidates:
            if os.path.isdir(candidate):
                return candidate
    return None


def _text(folder: Optional[str], name: str) -> Optional[str]:
    if folder is None:
        return None
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read().strip()
    except OSError:
        return None


def _table(folder: Optional[str], name: str) -> Dict[str, int]:
    """Lines of ``key value``."""
    arguments = (line.split() for line in (_text(folder, name) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in arguments if len(pair) == 2 and pair[1].isdigit()}
