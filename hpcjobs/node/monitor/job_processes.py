"""The processes of one job on this node, by their environment: memory, CPU time, storage, and which ranks are alive."""

import contextlib
import os
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple

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
    """Also that of processes that have ended since the first look, as far as they were seen or waited for."""
    read_bytes: int
    written_bytes: int
    ranks: FrozenSet[int]
    cores: FrozenSet[int]
    """Cores that the ranks, where there are none all of them, may run on."""
    requested_bytes: Optional[int]
    """Memory that the job has on this node by Slurm's variables; None: they do not say."""


class _Described(NamedTuple):
    """What the environment of a process says, as long as it runs the same program."""

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
    """Reads /proc; what it has learnt of a process is kept until the process runs another program or ends."""

    def __init__(self, job_id: str, *, proc: str = "/proc") -> None:
        self._marks = {b"HPCJOBS_JOB_ID=" + job_id.encode(), b"SLURM_JOB_ID=" + job_id.encode()}
        self._proc, self._own, self._user = proc, os.getpid(), os.geteuid()
        self._known: Dict[int, _Described] = {}
        self._spent: Dict[int, _Spent] = {}
        self._ended_s = 0.0

    def read(self, *, memory: bool = True) -> Usage:
        """What the job's processes use now; without ``memory`` faster, where the job's control group counts it."""
        seen: Dict[int, _Described] = {}
        spent: Dict[int, _Spent] = {}
        held = read = written = 0
        memory_source = "pss"
        ranks: Set[int] = set()
        pids: List[int] = []
        rank_pids: List[int] = []
        for name in os.listdir(self._proc):
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
            spent[pid] = _Spent(int(fields[1]), fields[19], sum(map(int, fields[11:15])) / _TICKS)
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
        """Whether ``spent`` has the time of a process seen before: as its own, or as that of a parent of the job."""
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
                return None  # it may not be read, and half of what a sample costs are such processes
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
        """What may not be read is not the job's."""
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
        """Memory of a process, its share of what it has in common with others (Linux 4.14); None: not to be read."""
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
    """Slurm counts megabytes, for the node or for each of its cores; 0 is all of the node, of which it says no more."""
    texts = (variables.get(name, b"") for name in (b"SLURM_MEM_PER_NODE", b"SLURM_MEM_PER_CPU", b"SLURM_CPUS_ON_NODE"))
    per_node, per_cpu, cpus = (int(text) if text.isdigit() else 0 for text in texts)
    return (per_node or per_cpu * cpus) << 20


def _cores(pids: List[int]) -> FrozenSet[int]:
    cores: Set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return frozenset(cores)
