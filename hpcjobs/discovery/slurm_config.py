"""Values from ``scontrol show config``, ``show partition`` and ``show node``."""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from hpcjobs import slurm_commands
from hpcjobs.discovery.partitions import (
    Accounting,
    Association,
    ClusterFacts,
    Modules,
    NodeFacts,
    PartitionInfo,
    Qos,
    Runtime,
    SlurmConfig,
)
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, SchedulerError
from hpcjobs.files import user_name
from hpcjobs.processes.programs import Result, Runner, run
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler.slurm import parse
from hpcjobs.scheduler.slurm.parse import TableRow
from hpcjobs.site.partition import count_gpus
from hpcjobs.slurm_commands import HOST_PART, hosts_of
from hpcjobs.units import time_limit_s

_MARK = "hpcjobs-modules"
_TIMEOUT_S = 60
_LIST_MODULES = (
    f'type module >/dev/null 2>&1 || exit 0; printf \'\\n{_MARK} %s|%s\\n\' "${{LMOD_PKG-}}" "${{MODULESHOME-}}"; '
    "module -t avail 2>&1"
)
MODULES_COMMAND = ("timeout", str(_TIMEOUT_S), "bash", "-lc", _LIST_MODULES)
"""Asks a login shell for its module system and the available modules; a profile may print before the mark."""
TOPICS = {
    "MPI": re.compile(
        r"(?i)(^|[/_-])(open-?mpi|hpcx|mpich|mvapich2?|impi|intel-?mpi|intelmpi|cray-mpich)([/._-]|\d|$)"
    ),
    "CUDA or ROCm": re.compile(r"(?i)(^|/)(cuda(toolkit)?|cudnn|nccl|nvhpc|rocm)([/._-]|\d|$)"),
    "containers": re.compile(r"(?i)(^|/)(apptainer|singularity(ce|pro)?|enroot|charliecloud|podman)([/._-]|\d|$)"),
    "Python": re.compile(
        r"(?i)(^|/)(python3?|(ana|mini)conda[23]?|mini(forge|mamba)\d?|mamba|micromamba)([/._-]|\d|$)"
    ),
}
_TYPES_LINE = re.compile(r"(?i)mpi (?:plugin )?types are")
_TYPE = re.compile(r"[a-z][\w-]*\Z", re.ASCII)


def parse_mpi_types(out: str) -> tuple[str, ...]:
    """The types of ``srun --mpi=list``: one per line, or after the colon in old versions."""
    if not _TYPES_LINE.search(out):
        return ()
    lines = (line.removeprefix("srun:").strip() for line in out.splitlines())
    return tuple(sorted({line for line in lines if _TYPE.match(line)}))


def parse_modules(out: str) -> Modules | None:
    """The module system and its modules; None: a login shell has no ``module`` command."""
    _, mark, rest = out.rpartition(f"\n{_MARK} ")
    if not mark:
        return None
    first, _, listing = rest.partition("\n")
    lmod, _, home = first.strip().partition("|")
    lines = (re.sub(r"\((default|D|L|,)+\)$", "", line.strip()) for line in listing.splitlines())
    names = tuple(
        dict.fromkeys(line for line in lines if line and line[0] not in "/-(" and not line.endswith((":", "/")))
    )
    folder = lmod or home
    return Modules(
        system="Lmod" if lmod else "Environment Modules" if home else "modules",
        init=f"{folder}/init/bash" if folder else None,
        names=tuple(name for name in names if name.isprintable() and " " not in name),
    )


def modules_of(topic: str, names: Iterable[str]) -> tuple[str, ...]:
    """The modules of one of `TOPICS`."""
    return tuple(name for name in names if TOPICS[topic].search(name))


def container_runtimes(srun_help: str) -> tuple[Runtime, ...]:
    """The container runtimes to be seen on this host, and Pyxis where srun has its options."""
    runtimes = [
        Runtime(name, f"{path} on this host") for name in ("apptainer", "singularity") if (path := shutil.which(name))
    ]
    if "--container-image" in srun_help:
        runtimes.append(Runtime("pyxis", "srun --help: --container-image"))
    return tuple(runtimes)


_SETTING = re.compile(r"(?m)^\s*(\S+)\s*= ?(.*?)\s*$")
_FIELD = re.compile(r"([A-Za-z]\w*)=(.*?)(?=\s+[A-Za-z]\w*=|\s*$)")
_SET_BY = re.compile(r"\[([\w.-]+)@(\d{1,11})\]\Z")
_NO_LIMIT = ("UNLIMITED", "INFINITE", "NONE")
_KIND = (
    *(" CPUEfctv=", " CPUTot=", " AvailableFeatures=", " Gres="),
    *(" RealMemory=", " MemSpecLimit=", " State=", " Partitions="),
)
"""The fields of a node that matter here."""
_REASON = re.compile(r" Reason=(.*?)(?=\s+[A-Za-z]\w*=|\s*$)")
_NAMES = 3
"""So many names of nodes that are alike are kept, for messages."""
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.DOTALL)
_UNSET_MEMORY_MB = 1
"""RealMemory of a node without a value in slurm.conf."""


def parse_config(out: str) -> SlurmConfig:
    """The settings that matter here, of ``scontrol show config``."""
    row = TableRow(dict(reversed(_SETTING.findall(out))))
    requeue = row.count("JobRequeue")
    return SlurmConfig(
        cluster=row.text("ClusterName"),
        version=row.text("SLURM_VERSION"),
        select_type=row.text("SelectType"),
        mpi_default=row.text("MpiDefault"),
        enforces=frozenset(split_list(row.text("AccountingStorageEnforce"))) - {"none"},
        job_requeue=None if requeue is None else requeue > 0,
        max_array_size=row.count("MaxArraySize"),
        preempt_type=row.text("PreemptType"),
        tmp_fs=row.text("TmpFS"),
        submit_plugins=split_list(row.text("JobSubmitPlugins")),
    )


class NodeReader:
    """Reads ``scontrol --all --oneliner show node`` line by line; a node without CPUs is left out.

    Only kinds of nodes are kept: a cluster may have a million nodes. The fields that define a kind are cut out of the
    line, which has forty more; the free texts Comment and Reason are at its end.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], list[str]] = {}
        self._counts: dict[tuple[str, ...], int] = {}
        self.messages: list[str] = []
        """Other lines: error messages of scontrol."""

    def read(self, line: str) -> None:
        """Read one line."""
        if not line.startswith("NodeName="):
            if line.strip():
                self.messages.append(line)
            return
        reason = _REASON.search(line) if " Reason=" in line else None
        kind = (*(_cut(line, field) for field in _KIND), reason[1] if reason else "")
        self._counts[kind] = self._counts.get(kind, 0) + 1
        names = self._kinds.setdefault(kind, [])
        if len(names) < _NAMES:
            names.append(_cut(line, "NodeName="))

    def nodes(self) -> tuple[NodeFacts, ...]:
        """All that were read."""
        columns = [field.strip(" =") for field in _KIND] + ["Reason"]
        nodes = (
            _node(TableRow(dict(zip(columns, kind, strict=True))), tuple(names), self._counts[kind])
            for kind, names in self._kinds.items()
        )
        return tuple(node for node in nodes if node.cpus)


def _cut(line: str, field: str) -> str:
    begin = line.find(field)
    if begin < 0:
        return ""
    begin += len(field)
    end = line.find(" ", begin)
    return line[begin:] if end < 0 else line[begin:end]


class _HostRange(NamedTuple):
    """Hosts that differ in one number with this many digits."""

    before: str
    digits: int
    after: str
    first: int
    last: int


def _ranges_of(nodelist: str) -> Iterator[_HostRange]:
    """``nodelist`` as ranges of numbers of equal length: ``n[8-12]`` is ``n[8-9]`` and ``n[10-12]``."""
    for part in HOST_PART.findall(nodelist):
        head, _, rest = part.rpartition("[")
        inside, _, after = rest.partition("]")
        simple = head and not re.search(r"\d", after)
        pieces = [piece.partition("-") for piece in inside.split(",")] if simple else []
        for before, (first, _, last) in product(hosts_of(head) if simple else (), pieces):
            yield from _split_range(before, first, last or first, after)
        for name in () if simple else hosts_of(part):
            match = _NUMBERED.match(name)
            yield from (
                _split_range(match[1], match[2], match[2], match[3]) if match else (_HostRange(name, 0, "", 0, 0),)
            )


def _split_range(before: str, first: str, last: str, after: str) -> Iterator[_HostRange]:
    low, digits = int(first), len(first)
    while low <= int(last):
        high = min(int(last), 10**digits - 1)
        yield _HostRange(before, digits, after, low, high)
        low, digits = high + 1, digits + 1


def mean_nodes(out: str) -> tuple[NodeFacts, ...]:
    """The nodes in ``show partition``, where they themselves are hidden.

    Each has the mean of the smallest partition that it is in; its features and the models of its GPUs are not known.
    """
    rows = sorted(_records(out, "PartitionName"), key=lambda row: row.count("TotalNodes") or 0)
    ranges: dict[tuple[str, int, str], list[tuple[int, int, int]]] = {}
    for order, row in enumerate(rows):
        for hosts in _ranges_of(row.text("Nodes") or ""):
            ranges.setdefault(hosts[:3], []).append((hosts.first, hosts.last + 1, order))
    kinds: dict[tuple[int, ...], tuple[list[str], int]] = {}
    for (before, digits, after), held in ranges.items():
        borders = sorted({border for first, end, _ in held for border in (first, end)})
        for first, end in pairwise(borders):
            orders = tuple(dict.fromkeys(sorted(order for low, high, order in held if low <= first < high)))
            if orders:
                names, count = kinds.get(orders, ([], 0))
                more = range(first, min(end, first + _NAMES - len(names)))
                names += [f"{before}{number:0{digits}d}{after}" if digits else before for number in more]
                kinds[orders] = names, count + end - first
    nodes = (
        _mean_node(rows[orders[0]])._replace(
            names=tuple(names), size=count, partitions=frozenset(rows[order].raw("PartitionName") for order in orders)
        )
        for orders, (names, count) in kinds.items()
    )
    return tuple(node for node in nodes if node.cpus)


def _reason(text: str | None) -> str | None:
    """Why the node is drained; who set it, and when, by this machine's clock: all times are requested in seconds."""
    match = _SET_BY.search(text or "")
    if text is None or match is None:
        return text
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(match[2])))
    return f"{text[: match.start()]}[{match[1]}@{when}]"


def _mean_node(partition: TableRow) -> NodeFacts:
    count = partition.count("TotalNodes") or 1
    resources = partition.raw("TRES")
    memory = parse.read_bytes(parse.read_resource(resources, "mem"))
    return NodeFacts(
        names=(),
        size=0,
        partitions=frozenset(),
        cpus=(partition.count("TotalCPUs") or 0) // count,
        mem_mb=None if memory is None else (memory >> 20) // count,
        gpus=(parse.count_gpus(resources) or 0) // count,
        gpu_model=None,
        features=(),
    )


def split_list(value: str | None) -> tuple[str, ...]:
    """The parts of ``a,b``; none of ``None``."""
    return tuple(filter(None, (value or "").split(",")))


def _records(out: str, first: str) -> Iterator[TableRow]:
    """The records that begin with ``first``; of a field printed twice (a comment may hold NAME=VALUE) the first."""
    for line in out.splitlines():
        if line.startswith(f"{first}="):
            yield TableRow(dict(reversed(_FIELD.findall(line))))


def _partition(row: TableRow) -> PartitionInfo:
    return PartitionInfo(
        name=row.raw("PartitionName"),
        default=row.raw("Default") == "YES",
        state=row.text("State"),
        root_only=row.raw("RootOnly") == "YES",
        reservation_required=row.raw("ReqResv") == "YES",
        min_nodes=row.count("MinNodes"),
        max_nodes=row.count("MaxNodes"),
        max_time=read_limit(row.text("MaxTime"), f"MaxTime of partition {row.raw('PartitionName')}"),
        max_mem_per_node_mb=row.count("MaxMemPerNode"),
        max_mem_per_cpu_mb=row.count("MaxMemPerCPU"),
        max_cpus_per_node=row.count("MaxCPUsPerNode"),
        allow_groups=_unless_all(row.text("AllowGroups")),
        allow_accounts=_unless_all(row.text("AllowAccounts")),
        deny_accounts=split_list(row.text("DenyAccounts")),
        allow_qos=_unless_all(row.text("AllowQos")),
        deny_qos=split_list(row.text("DenyQos")),
        preempt_mode=row.text("PreemptMode"),
        priority_tier=row.count("PriorityTier"),
        grace_s=row.count("GraceTime"),
        exclusive=row.raw("OverSubscribe") == "EXCLUSIVE",
        alloc_nodes=None if row.raw("AllocNodes").upper() == "ALL" else row.text("AllocNodes"),
    )


def read_limit(text: str | None, what: str) -> str | None:
    """A time limit as Slurm prints it; None: no limit, or, with a warning, an unreadable one."""
    if text is None or text.upper() in _NO_LIMIT:
        return None
    try:
        time_limit_s(text)
    except ValueError as error:
        warnings.warn(f"{what} is left out: {error}", HpcJobsWarning, stacklevel=2)
        return None
    return text


def _unless_all(value: str | None) -> tuple[str, ...] | None:
    return None if value is None or value.upper() == "ALL" else split_list(value)


def _node(row: TableRow, names: tuple[str, ...], count: int) -> NodeFacts:
    memory = row.count("RealMemory")
    gpus = count_gpus(row.raw("Gres"))
    typed = [model for model in gpus if model is not None]
    return NodeFacts(
        names=names,
        size=count,
        partitions=frozenset(split_list(row.text("Partitions"))),
        cpus=row.count("CPUEfctv") or row.count("CPUTot") or 0,
        mem_mb=None if memory is None or memory <= _UNSET_MEMORY_MB else memory - (row.count("MemSpecLimit") or 0),
        gpus=sum(gpus.values()),
        gpu_model=typed[0] if len(gpus) == 1 and typed else None,
        features=split_list(row.text("AvailableFeatures")),
        gpu_models=tuple(f"{model}:{gpus[model]}" for model in typed) if 1 < len(typed) == len(gpus) else (),
        state=row.text("State"),
        reason=_reason(row.text("Reason")),
    )


ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs")
QOS = ("Name", "MaxWall", "MaxSubmitJobsPerUser")


def parse_associations(out: str, cluster: str | None) -> tuple[Association, ...]:
    """The associations of ``cluster``; the accounting may hold several clusters."""
    return tuple(
        Association(
            account=row.raw("Account"),
            partition=row.name("Partition"),
            qos=split_list(row.raw("QOS")),
            default_qos=row.name("DefaultQOS"),
            max_submit_jobs=row.count("MaxSubmitJobs"),
        )
        for row in _rows(out, ASSOCIATION)
        if row.raw("Account") and cluster in (None, row.raw("Cluster"))
    )


def parse_qos(out: str) -> tuple[Qos, ...]:
    """Every QOS with its longest time and its jobs per user."""
    return tuple(
        Qos(name, read_limit(row.name("MaxWall"), f"MaxWall of QOS {name}"), row.count("MaxSubmitJobsPerUser"))
        for row in _rows(out, QOS)
        if (name := row.raw("Name"))
    )


def _rows(out: str, columns: tuple[str, ...]) -> Iterator[TableRow]:
    for line in out.splitlines():
        values = line.strip().split("|")
        if len(values) == len(columns):
            yield TableRow(dict(zip(columns, values, strict=True)))


def read_cluster(slurm: Scheduler, runner: Runner = run) -> ClusterFacts:
    """Ask the cluster of this login node.

    Raises SchedulerError: Slurm does not answer, or does not show its configuration or partitions, which a site file
    needs.
    """
    config = parse_config(slurm.query(slurm_commands.show_config()))
    partitions = slurm.query(slurm_commands.show_partitions())
    nodes = _read_nodes(slurm)
    types = _run(runner, slurm_commands.list_mpi_types())
    modules = _run(runner, MODULES_COMMAND)
    step_options = _run(runner, slurm_commands.show_step_options())
    licenses = _query(slurm, slurm_commands.show_licenses())
    return ClusterFacts(
        config=config,
        partitions=tuple(_partition(row) for row in _records(partitions, "PartitionName")),
        nodes=mean_nodes(partitions) if nodes is None else nodes,
        nodes_are_hidden=nodes is None,
        accounting=_read_accounting(slurm, config.cluster),
        mpi_types=parse_mpi_types(types.out + types.err) or None if types is not None else None,
        modules=parse_modules(modules.out) if modules is not None else None,
        runtimes=container_runtimes("" if step_options is None else step_options.out),
        user_groups=_group_names(),
        host=os.uname().nodename,
        slurm_conf=os.environ.get("SLURM_CONF") or None,
        licenses=None
        if licenses is None
        else tuple((row.raw("LicenseName"), row.count("Total") or 0) for row in _records(licenses, "LicenseName")),
    )


def _read_nodes(slurm: Scheduler) -> tuple[NodeFacts, ...] | None:
    """Nodes from scontrol; None: this user may not see them."""
    reader = NodeReader()
    if slurm.follow(slurm_commands.show_nodes(), reader.read) == 0:
        return reader.nodes()
    if "permission denied" in "\n".join(reader.messages).lower():
        return None
    again = NodeReader()  # a busy controller is asked again, and an error is raised
    for line in slurm.query(slurm_commands.show_nodes()).splitlines():
        again.read(line)
    return again.nodes()


def _read_accounting(slurm: Scheduler, cluster: str | None) -> Accounting:
    user = user_name()
    associations = _query(slurm, slurm_commands.list_associations(ASSOCIATION, user=user))
    account = _query(slurm, slurm_commands.show_default_account(user)) if associations else None
    qos = _query(slurm, slurm_commands.list_qos(QOS)) if associations else None
    return Accounting(
        associations=None if associations is None else parse_associations(associations, cluster),
        default_account=next(iter((account or "").strip().splitlines()), None),
        qos=None if qos is None else parse_qos(qos),
        sacct_answers=_query(slurm, slurm_commands.check_accounting()) is not None,
    )


def _query(slurm: Scheduler, argv: Sequence[str]) -> str | None:
    """Output of the command; None: it is missing or forbidden, or accounting is off. A question reports that."""
    try:
        return slurm.query(argv)
    except SchedulerError:
        return None


def _run(runner: Runner, argv: Sequence[str]) -> Result | None:
    try:
        return runner(argv)
    except CommandMissingError:
        return None


def _group_names() -> frozenset[str]:
    """Names of this process's groups; a group without a name admits to no partition."""
    names = set()
    for gid in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(gid).gr_name)
    return frozenset(names)
