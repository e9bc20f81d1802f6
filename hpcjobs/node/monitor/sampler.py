"""One sample after the other: what the job's processes, its control group and its GPUs say."""

import os
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, FrozenSet, List, Optional, Tuple

from hpcjobs.node.monitor.cgroup import JobGroup
from hpcjobs.node.monitor.gpus import GpuReader
from hpcjobs.node.monitor.job_processes import JobProcesses, Usage

IDLE_PERCENT = 5.0
"""Below it, GPUs (where there are none, cores) count as idle."""
RECENT_S = 60.0
"""Over so long `busy_percent` is a mean."""


class NodeSampler:
    """Samples the processes of a job on this node.

    Rates and times are those since the sample before; a restarted rank is alive again.
    """

    def __init__(
        self, processes: JobProcesses, group: JobGroup, gpus: GpuReader, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes, self._group, self._gpus, self._clock = processes, group, gpus, clock
        self._before = clock(), processes.read(memory=False), group.cpu_s(), _network()
        self._seen_ranks: FrozenSet[int] = self._before[1].ranks
        self._idle_since: Optional[float] = clock()
        self._ended_since: Optional[float] = None
        self._recent: Deque[Tuple[float, float]] = deque()

    def sample(self) -> Dict[str, Any]:
        """The values of one `sample` line."""
        used = self._group.used_bytes()
        now, usage, network = self._clock(), self._processes.read(memory=used is None), _network()
        group_cpu_s = self._group.cpu_s()
        then, before, cpu_before, network_before = self._before
        self._before = now, usage, group_cpu_s, network
        passed = max(now - then, 1e-6)
        cpu_s = usage.cpu_s - before.cpu_s if group_cpu_s is None or cpu_before is None else group_cpu_s - cpu_before
        cores = len(usage.cores) or os.cpu_count() or 1
        cpu_percent = min(100.0, max(0.0, 100 * cpu_s / passed / cores))
        limit, gpu = self._group.limit_bytes(), self._gpus.read()
        # Cores say nothing of GPUs that are held and cannot be read, such as parts of one.
        busy = gpu["gpu_percent"] if self._gpus.are_held else cpu_percent
        values: Dict[str, Any] = {
            "cpu_percent": round(cpu_percent, 2),
            "cores": cores,
            "rss_bytes": usage.memory_bytes if used is None else used,
            "memory_source": usage.memory_source if used is None else "cgroup",
            "memory_limit_bytes": usage.requested_bytes if limit is None else limit,
            # Not below 0: a process or an interface that ends takes its counters with it.
            "network_received_bytes_per_s": max(0, network[0] - network_before[0]) / passed,
            "network_sent_bytes_per_s": max(0, network[1] - network_before[1]) / passed,
            "read_bytes_per_s": max(0, usage.read_bytes - before.read_bytes) / passed,
            "written_bytes_per_s": max(0, usage.written_bytes - before.written_bytes) / passed,
            "gpus": len(self._gpus) or None,
            "busy_percent": None if busy is None else round(self._mean_busy(now, busy), 2),
            "idle_s": None if busy is None else round(self._idle_s(now, busy), 1),
        }
        values.update(gpu)
        values.update(self._ranks(now, usage))
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}

    def _mean_busy(self, now: float, busy: float) -> float:
        self._recent.append((now, busy))
        while now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        return sum(value for _, value in self._recent) / len(self._recent)

    def _idle_s(self, now: float, busy: float) -> float:
        if busy >= IDLE_PERCENT:
            self._idle_since = None
            return 0.0
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since

    def _ranks(self, now: float, usage: Usage) -> Dict[str, Any]:
        self._seen_ranks |= usage.ranks
        ended: List[int] = sorted(self._seen_ranks - usage.ranks)
        self._ended_since = (self._ended_since or now) if ended else None
        return {
            "ranks": len(usage.ranks),
            "ended_ranks": ended,
            "ended_s": None if self._ended_since is None else round(now - self._ended_since, 1),
        }


def _network() -> Tuple[int, int]:
    """Bytes received and sent by all interfaces, loopback included, since ranks of one node talk there."""
    received = sent = 0
    try:
        with open("/proc/net/dev") as file:
            for line in file.read().splitlines()[2:]:
                fields = line.partition(":")[2].split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
    except OSError:
        return 0, 0
    return received, sent
