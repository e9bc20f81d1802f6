"""Samples the load of a job on this node: processes, control group, network and GPUs.

Node 0 of the job writes monitor.jsonl, node N monitor-N.jsonl.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import re
import signal
import sys
import time
from collections import deque
from itertools import takewhile
from typing import Any, Callable, Deque, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple

from hpcjobs.processes.fork import SignalPipe
from hpcjobs.record import monitor_name
from hpcjobs.record.monitor import END_LINE, Head, decode_head, encode_head, encode_sample, is_end

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
        """The least limit of the job's group and its parents."""
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
    """Folder of the job's group: the ``job_N`` above this process."""
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


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def load_library() -> Optional[Any]:
    """None: this node has no NVIDIA driver."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


_OF_OTHER_VENDORS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NONE_HELD = ("", "-1", "NoDevFiles")
"""Values of Slurm and of users for "no GPU"."""


class GpuReader:
    """Reads the GPUs of the job: CUDA_VISIBLE_DEVICES, otherwise all visible ones."""

    are_held: bool
    """Whether the job has GPUs, also unreadable ones: of another vendor, or without a driver's library."""

    def __init__(self, environ: Mapping[str, str], library: Optional[Any]) -> None:
        self._library = library
        self._handles: List[ctypes.c_void_p] = []
        self._count = 0
        held = environ.get("CUDA_VISIBLE_DEVICES", environ.get("SLURM_JOB_GPUS"))
        others = [environ[name] for name in _OF_OTHER_VENDORS if name in environ]
        self.are_held = any(names not in _NONE_HELD for names in (others if held is None else [held, *others]))
        if library is None or held in _NONE_HELD or library.nvmlInit_v2() != 0:
            return
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        listed = map(str.strip, (held or "").split(","))
        # CUDA takes the GPUs before the first name that is none.
        names = range(count.value) if held is None else list(takewhile(lambda name: name not in ("", "-1"), listed))
        for name in names:
            handle = ctypes.c_void_p()
            if isinstance(name, str) and not name.isdigit():
                code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            else:
                code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            if code == 0:
                self._handles.append(handle)
        self._count = len(self._handles if held is None else names)  # another user's may be visible, and refuse
        self.are_held = self.are_held or bool(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> Dict[str, Optional[float]]:
        """Read mean utilisation and hottest temperature of the GPUs that answer, sums of memory and power of all.

        None: not measured; a sum is not where one GPU does not answer.
        """
        percents = self._each(_Utilization, "nvmlDeviceGetUtilizationRates", lambda value: value.gpu)
        used = self._each(_Memory, "nvmlDeviceGetMemoryInfo", lambda value: value.used)
        watts = self._each(ctypes.c_uint, "nvmlDeviceGetPowerUsage", lambda value: value.value / 1e3)
        degrees = self._each(ctypes.c_uint, "nvmlDeviceGetTemperature", lambda value: value.value, 0)
        return {
            "gpu_percent": sum(percents) / len(percents) if percents else None,
            "gpu_memory_bytes": sum(used) if used and len(used) == self._count else None,
            "gpu_power_w": sum(watts) if watts and len(watts) == self._count else None,
            "gpu_temperature_c": max(degrees) if degrees else None,
        }

    def _each(self, kind: Any, function: str, take: Callable[[Any], float], *arguments: int) -> List[float]:
        """Ask each device for a value; devices without it are left out (a part of a GPU has no utilisation)."""
        answers = []
        for handle in self._handles:
            value = kind()
            if getattr(self._library, function)(handle, *arguments, ctypes.byref(value)) == 0:
                answers.append(float(take(value)))
        return answers


_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 4096
_RANKS = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK", b"SLURM_PROCID")
"""Variables that name a rank, the first one counts; SLURM_PROCID only within a step: a batch script has it too."""


class Usage(NamedTuple):
    """Of all processes of the job that may be read."""

    memory_bytes: int
    """Shared pages count once, in shares (PSS); 0 if memory was not to be read."""
    memory_source: str
    """``pss``; ``rss`` where the share of a process could not be read: shared memory then counts for each."""
    cpu_s: float
    """Including processes that ended since the first look, if they were seen or waited for."""
    read_bytes: int
    written_bytes: int
    ranks: FrozenSet[int]
    cores: FrozenSet[int]
    """Cores that the ranks, where there are none all of them, may run on."""
    requested_bytes: Optional[int]
    """Memory that the job has on this node by Slurm's variables; None: they do not say."""


class _Described(NamedTuple):
    """Facts from the environment of a process, valid while it runs the same program."""

    key: bytes
    is_of_the_job: bool
    rank: Optional[int] = None
    requested_bytes: int = 0


class _Spent(NamedTuple):
    """CPU time of a process and of its children that ended and that it has waited for."""

    parent: int
    start: bytes
    cpu_s: float


class JobProcesses:
    """Reads /proc; facts about a process are kept until it ends or runs another program."""

    def __init__(self, job_id: str = "", *, ranks: Optional[Mapping[int, int]] = None, proc: str = "/proc") -> None:
        """Processes are the job's by the job id in their environment; ``ranks`` names them instead, rank by process."""
        self._marks = {b"HPCJOBS_JOB_ID=" + job_id.encode(), b"SLURM_JOB_ID=" + job_id.encode()}
        self._ranks_by_pid = ranks
        self._proc, self._own, self._user = proc, os.getpid() if ranks is None else None, os.geteuid()
        self._known: Dict[int, _Described] = {}
        self._spent: Dict[int, _Spent] = {}
        self._ended_s = 0.0

    def read(self, *, memory: bool = True) -> Usage:
        """The current usage of the job's processes; faster without ``memory``, if the control group counts it."""
        seen: Dict[int, _Described] = {}
        spent: Dict[int, _Spent] = {}
        held = read = written = 0
        memory_source = "pss"
        ranks: Set[int] = set()
        pids: List[int] = []
        rank_pids: List[int] = []
        for name in os.listdir(self._proc) if self._ranks_by_pid is None else map(str, self._ranks_by_pid):
            if not name.isdigit() or int(name) == self._own:
                continue
            pid = int(name)
            fields = self._stat(pid)
            if fields is None:
                continue
            before = self._known.get(pid)
            # A process that starts another program keeps its number and its start.
            key = fields[-1] + fields[19]
            described = before if before is not None and before.key == key else self._describe(pid, key)
            seen[pid] = described
            if not described.is_of_the_job:
                continue
            # Of ranks alone their children's time would arrive at once, when a child has ended.
            ticks = fields[11:15] if self._ranks_by_pid is None else fields[11:13]
            spent[pid] = _Spent(int(fields[1]), fields[19], sum(map(int, ticks)) / _TICKS)
            if fields[0] == b"Z":  # its time is its parent's once the parent has waited for it
                continue
            pids.append(pid)
            if memory:
                share = self._proportional_bytes(pid)
                held += int(fields[21]) * _PAGE if share is None else share
                memory_source = "rss" if share is None else memory_source
            storage = self._storage(pid)
            read, written = read + storage[0], written + storage[1]
            if described.rank is not None:
                ranks.add(described.rank)
                rank_pids.append(pid)
        self._ended_s += sum(last.cpu_s for pid, last in self._spent.items() if not self._is_counted(pid, spent))
        self._known, self._spent = seen, spent
        cpu_s = self._ended_s + sum(process.cpu_s for process in spent.values())
        requested = max((seen[pid].requested_bytes for pid in pids), default=0)
        cores = _cores(rank_pids or pids)
        return Usage(held, memory_source, cpu_s, read, written, frozenset(ranks), cores, requested or None)

    def _is_counted(self, pid: int, spent: Dict[int, _Spent]) -> bool:
        """Whether ``spent`` contains the time of a known process, in the entry of the process or of a parent."""
        for _ in range(len(self._spent)):
            last = self._spent.get(pid)
            if last is None:
                return False
            if pid in spent and spent[pid].start == last.start:
                return True
            pid = last.parent
        return False

    def _stat(self, pid: int) -> Optional[List[bytes]]:
        """The fields from the state on, and the program's name behind them; None: ended, or another user's."""
        try:
            if self._user and os.stat(f"{self._proc}/{pid}").st_uid != self._user:
                return None  # unreadable, and such processes are half of a sample's cost
            file = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY)
        except OSError:
            return None
        try:
            head, _, rest = os.read(file, _STAT_BYTES).rpartition(b")")
        except OSError:
            return None
        finally:
            os.close(file)
        fields = rest.split()
        return None if fields[0] == b"X" else [*fields, head.partition(b"(")[2]]

    def _describe(self, pid: int, key: bytes) -> _Described:
        """Read the environment; an unreadable process does not belong to the job."""
        if self._ranks_by_pid is not None:
            return _Described(key, True, self._ranks_by_pid[pid])
        try:
            with open(f"{self._proc}/{pid}/environ", "rb") as file:
                entries = set(file.read().split(b"\0"))
        except OSError:
            return _Described(key, False)
        if not self._marks & entries or b"HPCJOBS_MONITOR=1" in entries:
            return _Described(key, False)
        variables = dict(entry.partition(b"=")[::2] for entry in entries)
        for name in _RANKS:
            text = variables.get(name, b"")
            if text.isdigit() and (name != b"SLURM_PROCID" or variables.get(b"SLURM_STEP_ID", b"").isdigit()):
                return _Described(key, True, int(text), _requested_bytes(variables))
        return _Described(key, True, None, _requested_bytes(variables))

    def _proportional_bytes(self, pid: int) -> Optional[int]:
        """Memory of a process with its share of common pages (Linux 4.14); None: unreadable."""
        try:
            with open(f"{self._proc}/{pid}/smaps_rollup", "rb") as file:
                line = next((line for line in file if line.startswith(b"Pss:")), None)
        except OSError:
            return None
        return None if line is None else int(line.split()[1]) << 10

    def _storage(self, pid: int) -> Tuple[int, int]:
        try:
            with open(f"{self._proc}/{pid}/io", "rb") as file:
                values = dict(line.split(b": ") for line in file.read().splitlines())
        except (OSError, ValueError):
            return 0, 0
        return int(values.get(b"read_bytes", 0)), int(values.get(b"write_bytes", 0))


def _requested_bytes(variables: Mapping[bytes, bytes]) -> int:
    """Memory request in bytes; Slurm counts megabytes per node or per core, and 0 means the complete node."""
    texts = (variables.get(name, b"") for name in (b"SLURM_MEM_PER_NODE", b"SLURM_MEM_PER_CPU", b"SLURM_CPUS_ON_NODE"))
    per_node, per_cpu, cpus = (int(text) if text.isdigit() else 0 for text in texts)
    return (per_node or per_cpu * cpus) << 20


def _cores(pids: List[int]) -> FrozenSet[int]:
    cores: Set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return frozenset(cores)


IDLE_PERCENT = 5.0
"""Below it, GPUs (where there are none, cores) count as idle."""
RECENT_S = 60.0
"""Period of the mean `busy_percent`."""


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
        # The load of cores does not show whether unreadable GPUs, such as parts of one, are idle.
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


_FRESH = 3
"""A file that was written within this many intervals has a writer, unless its last line is an end."""


def watch(run_dir: str, job_id: str, interval_s: float, environ: Mapping[str, str]) -> int:
    """Sample until SIGTERM. If another sampler writes for this node, report that and end: 1 if it is of another job."""
    signals = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    node = int(environ.get("SLURM_NODEID", "0"))
    path = os.path.join(run_dir, monitor_name(node))
    with io.FileIO(path, "a") as file:
        writer = _writer(path, interval_s)
        if not _lock(file) or (writer is not None and _grows(path, signals, interval_s)):
            print(f"hpcjobs: {writer or 'another sampler'} samples {path} already", file=sys.stderr)
            head = _read_head(path)
            return 0 if head is None or head.job_id in (job_id, None) else 1
        _sample(file, path, signals, job_id, interval_s, environ)
    return 0


def _sample(
    file: io.FileIO, path: str, signals: SignalPipe, job_id: str, interval_s: float, environ: Mapping[str, str]
) -> None:
    """Append samples until SIGTERM; samples of another node or job (an earlier attempt) are removed first."""
    sampler = NodeSampler(JobProcesses(job_id), JobGroup(), GpuReader(environ, load_library()))
    host = environ.get("SLURMD_NODENAME") or os.uname().nodename
    head = _read_head(path)
    if head is not None and (head.host, head.job_id) == (host, job_id):
        if not _has_complete_lines(path):
            file.write(b"\n")
    else:
        file.truncate(0)
        head = Head(host, time.time(), interval_s, job_id)
        _append(file, encode_head(head))
    last = False
    while not last:
        # Slurm and users signal all steps of a job: USR1 and USR2 are for the program.
        came = signals.wait(interval_s)
        last = any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for number in came)
        if came and not last:
            continue
        _append(file, encode_sample(time.time() - head.started_at, sampler.sample()))
    _append(file, END_LINE)


def _lock(file: io.FileIO) -> bool:
    """Keep other samplers of this node away; where the file system has no locks, the file's age alone does."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _append(file: io.FileIO, line: str) -> None:
    """Append a line; on a full disk it is lost, and the next one is tried."""
    try:
        file.write(line.encode() + b"\n")
    except OSError as error:
        print(f"hpcjobs: a sample is lost: {error.strerror}", file=sys.stderr)


def _grows(path: str, signals: SignalPipe, interval_s: float) -> bool:
    """Whether a line comes in the time of some intervals: a sampler that was killed may have written just before."""
    size = os.path.getsize(path)
    return any(signals.wait(interval_s) or os.path.getsize(path) != size for _ in range(_FRESH))


def _read_head(path: str) -> Optional[Head]:
    """The first line; None: it is cut short, or cannot be read."""
    try:
        with open(path, "rb") as file:
            return decode_head(file.readline())
    except OSError:
        return None


def _has_complete_lines(path: str) -> bool:
    """Whether the last line ends: of a sampler that was killed it may not."""
    with open(path, "rb") as file:
        return not file.seek(0, 2) or (file.seek(-1, 2), file.read())[1] == b"\n"


def _writer(path: str, interval_s: float) -> Optional[str]:
    """The host that writes to ``path`` now; None: no writer. An incomplete line is a sign of a writer."""
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return None
    head = _read_head(path) or Head("another sampler", 0.0, interval_s)
    if not status.st_size or time.time() - status.st_mtime >= _FRESH * (head.interval_s or interval_s):
        return None
    return None if lines[-1] == b"" and is_end(lines[-2]) else head.host


def main() -> int:
    """``python monitor.pyz RUN_DIR JOB_ID INTERVAL_S``: samples until SIGTERM, or until the job is over."""
    if len(sys.argv) != 4:
        sys.exit("usage: python monitor.pyz RUN_DIR JOB_ID INTERVAL_S")
    return watch(sys.argv[1], sys.argv[2], float(sys.argv[3]), os.environ)
