"""Facts that a cluster reports about itself, and the partitions of a site file that follow from them.

A partition has nodes by shape, limits, and required options of this user's jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hpcjobs.scheduler.slurm.estimates import submit_host_problem
from hpcjobs.site.checks import check_slurm_name, is_name
from hpcjobs.units import format_megabytes, time_limit_s


class SlurmConfig(NamedTuple):
    """The settings of slurm.conf that a site file depends on."""

    cluster: str | None
    version: str | None
    select_type: str | None
    mpi_default: str | None
    enforces: frozenset[str]
    """AccountingStorageEnforce."""
    job_requeue: bool | None
    max_array_size: int | None
    preempt_type: str | None
    tmp_fs: str | None
    submit_plugins: tuple[str, ...] = ()
    """JobSubmitPlugins."""


class NodeFacts(NamedTuple):
    """Nodes of one kind with the resources for jobs: a cluster may have a million nodes of a few kinds."""

    names: tuple[str, ...]
    """The first few of them."""
    size: int
    partitions: frozenset[str]
    cpus: int
    mem_mb: int | None
    gpus: int
    gpu_model: str | None
    """``None``: no GPU, no type, or GPUs of several types in the node."""
    features: tuple[str, ...]
    gpu_models: tuple[str, ...] = ()
    """``TYPE:COUNT`` of each type, where the node has several (MIG slices)."""
    state: str | None = None
    reason: str | None = None
    """Why it is drained or down."""

    @property
    def unavailable(self) -> bool:
        """Whether no job starts on it: it is drained, draining, down or failing."""
        flags = set((self.state or "").upper().replace("*", "").split("+"))
        return not flags.isdisjoint(("DRAIN", "DOWN", "FAIL", "FUTURE", "POWERED_DOWN_FAILED"))


class PartitionInfo(NamedTuple):
    """One partition as ``scontrol show partition`` prints it."""

    name: str
    default: bool
    state: str | None
    root_only: bool
    reservation_required: bool
    min_nodes: int | None
    max_nodes: int | None
    max_time: str | None
    """In Slurm's spelling; ``None``: no limit."""
    max_mem_per_node_mb: int | None
    max_mem_per_cpu_mb: int | None
    max_cpus_per_node: int | None
    allow_groups: tuple[str, ...] | None
    """``None``: all, as for accounts and QOS."""
    allow_accounts: tuple[str, ...] | None
    deny_accounts: tuple[str, ...]
    allow_qos: tuple[str, ...] | None
    deny_qos: tuple[str, ...]
    preempt_mode: str | None
    priority_tier: int | None
    grace_s: int | None
    exclusive: bool = False
    """OverSubscribe=EXCLUSIVE: each job has its nodes for itself."""
    alloc_nodes: str | None = None
    """The hosts that may submit there, as Slurm's host list; ``None``: all."""


class Association(NamedTuple):
    """One account that the user may charge."""

    account: str
    partition: str | None
    """The only partition it is valid in; ``None``: all."""
    qos: tuple[str, ...]
    default_qos: str | None
    max_submit_jobs: int | None


class Qos(NamedTuple):
    """Limits of a QOS."""

    name: str
    max_wall: str | None
    max_submit_jobs: int | None


class Accounting(NamedTuple):
    """Facts from sacctmgr and sacct."""

    associations: tuple[Association, ...] | None
    default_account: str | None
    qos: tuple[Qos, ...] | None
    sacct_answers: bool


class Modules(NamedTuple):
    """The module system of a login shell."""

    system: str
    """``Lmod``, ``Environment Modules``, or ``modules`` where neither can be recognized."""
    init: str | None
    """The script that defines ``module``."""
    names: tuple[str, ...]


class Runtime(NamedTuple):
    """A container runtime: its name in a site file, and where it was seen."""

    name: str
    origin: str


class ClusterFacts(NamedTuple):
    """All that could be read."""

    config: SlurmConfig
    partitions: tuple[PartitionInfo, ...]
    nodes: tuple[NodeFacts, ...]
    accounting: Accounting
    mpi_types: tuple[str, ...] | None
    modules: Modules | None
    runtimes: tuple[Runtime, ...]
    user_groups: frozenset[str]
    host: str
    slurm_conf: str | None
    """SLURM_CONF of the environment."""
    licenses: tuple[tuple[str, int], ...] | None = None
    """Name and number of each licence that Slurm counts."""
    nodes_are_hidden: bool = False
    """Slurm refuses to show nodes (PrivateData=nodes): those here have the mean of their partition."""


class Answers(NamedTuple):
    """The user's answers by flags; ``None`` and ``()``: not answered."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    mpi: str | None = None
    interface: str | None = None
    modules: tuple[str, ...] = ()
    module_init: str | None = None
    conda: str | None = None
    venv: str | None = None
    container_runtime: str | None = None
    scratch: str | None = None
    run_root: str | None = None
    login: str | None = None


class ProposedEntry(NamedTuple):
    """One key of the file with its YAML value and the origin of the value."""

    key: str
    value: object
    origin: str


class PartitionEntry(NamedTuple):
    """One partition: its keys, and comments for the reader."""

    name: str
    entries: tuple[tuple[str, object], ...]
    notes: tuple[str, ...] = ()


class Omission(NamedTuple):
    """A partition that the user's jobs cannot use."""

    partition: str
    reason: str


class Question(NamedTuple):
    """An unknown value: the key, the command that shows it, and the flag that sets it."""

    key: str
    text: str
    command: str
    flag: str


class ProposedSite(NamedTuple):
    """A site file before it is written."""

    name: str
    entries: tuple[ProposedEntry, ...]
    partitions: tuple[PartitionEntry, ...]
    omissions: tuple[Omission, ...]
    notes: tuple[str, ...]
    """Facts that no key holds."""
    questions: tuple[Question, ...]


_MOST_GROUPS = 12
"""Above it, features distinguish nodes, not node shapes: each rack or switch has a feature."""
_PREEMPTS = {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend"}
_REFUSES_JOBS = ("DRAIN", "INACTIVE")


class UserIdentity(NamedTuple):
    """The default account and QOS of the user's jobs, and the other permitted ones; ``None``: not known."""

    account: str | None
    default_qos: str | None
    associations: tuple[Association, ...] | None

    @property
    def accounts(self) -> tuple[str, ...] | None:
        """Every account that the user may charge, the usual one first."""
        if self.associations is None:
            return None
        names = dict.fromkeys(association.account for association in self.associations)
        return tuple(sorted(names, key=lambda name: name != self.account))

    def associations_in(self, partition: str) -> tuple[Association, ...] | None:
        """Those that jobs of ``partition`` are charged by, the usual account first: one that names the partition comes
        before the account's others."""
        if self.associations is None:
            return None
        named = {a.account for a in self.associations if a.partition == partition}
        valid = [a for a in self.associations if a.partition == (partition if a.account in named else None)]
        return tuple(sorted(valid, key=lambda a: a.account != self.account))


def describe_partitions(
    cluster: ClusterFacts, identity: UserIdentity, *, time: str
) -> tuple[tuple[PartitionEntry, ...], tuple[Omission, ...]]:
    """The partitions that the user can use, and the others with the reason.

    ``time`` is the limit of jobs without one; a partition that allows less gets its maximum.
    """
    results = [_describe(partition, cluster, identity, time) for partition in cluster.partitions]
    entries = tuple(result for result in results if isinstance(result, PartitionEntry))
    return entries, tuple(result for result in results if isinstance(result, Omission))


def _describe(
    partition: PartitionInfo, cluster: ClusterFacts, identity: UserIdentity, time: str
) -> PartitionEntry | Omission:
    nodes = [node for node in cluster.nodes if partition.name in node.partitions]
    if (reason := unusable_reason(partition, nodes, cluster)) is not None:
        return Omission(partition.name, reason)
    choice = _choose_account(partition, identity)
    if isinstance(choice, Omission):
        return choice
    defaults: dict[str, object] = dict(choice)
    if (least := time_limit_s(partition.max_time)) is not None and least < (time_limit_s(time) or least + 1):
        defaults["time"] = partition.max_time
    if partition.min_nodes is not None and partition.min_nodes > 1:
        defaults["nodes"] = partition.min_nodes
    if partition.exclusive:
        defaults["exclusive"] = True
    shape, notes = _nodes(nodes)
    if partition.state not in (None, "UP"):
        notes += (f"its state was {partition.state}: jobs wait",)
    limits: list[tuple[str, object]] = [
        ("min_nodes", partition.min_nodes if (partition.min_nodes or 0) > 1 else None),
        ("max_nodes", partition.max_nodes or None),
        ("max_time", partition.max_time),
        ("max_mem_per_node", format_megabytes(partition.max_mem_per_node_mb)),
        ("max_mem_per_cpu", format_megabytes(partition.max_mem_per_cpu_mb)),
        ("max_cpus_per_node", partition.max_cpus_per_node or None),
        ("qos", partition.allow_qos),
        ("accounts", partition.allow_accounts),
        *_preemption(partition, cluster),
        ("defaults", defaults or None),
    ]
    stated = ((key, value) for key, value in limits if value is not None)
    return PartitionEntry(partition.name, (*shape, *stated), notes)


def unusable_reason(partition: PartitionInfo, nodes: Sequence[NodeFacts], cluster: ClusterFacts) -> str | None:
    """Why no job of this user can run there."""
    if not is_name(partition.name, check_slurm_name):
        return "a site file cannot hold its name"
    if partition.root_only:
        return "RootOnly=YES"
    if partition.reservation_required:
        return "ReqResv=YES: it needs a reservation"
    if partition.state in _REFUSES_JOBS:
        return f"State={partition.state}: it takes no jobs"
    if partition.max_nodes == 0:
        return "MaxNodes=0: it takes no jobs"
    if partition.allow_groups is not None and not cluster.user_groups & {*partition.allow_groups}:
        return f"AllowGroups={','.join(partition.allow_groups)}: you are in none of them"
    if (problem := submit_host_problem(partition.alloc_nodes or "", cluster.host)) is not None:
        return problem
    if not nodes:
        return "scontrol shows none of its nodes (of cloud nodes that are off, only where PrivateData has cloud)"
    return None


def _choose_account(partition: PartitionInfo, identity: UserIdentity) -> Omission | list[tuple[str, object]]:
    """The account and QOS that jobs need to name there, or the reason why no account of the user's will do."""
    mine = identity.associations_in(partition.name)
    if mine is None:
        return []
    if not mine:
        valid = ", ".join(f"{a.account} in {a.partition}" for a in identity.associations or ())
        return Omission(partition.name, f"account: no account of yours is valid there; you have {valid}")
    accounts = list(dict.fromkeys(a.account for a in mine))
    charged = _select_accepted(accounts, partition.allow_accounts, partition.deny_accounts)
    if not charged:
        rule = _rule(partition.allow_accounts, partition.deny_accounts)
        return Omission(partition.name, f"account: it {rule}; you have {', '.join(accounts)}")
    usable = [a for a in mine if a.account in charged]
    for association in usable:
        is_usual = association.account == identity.account
        default = identity.default_qos if is_usual else association.default_qos
        names = sorted(association.qos, key=lambda name: name != default)
        qos = _select_accepted(names, partition.allow_qos, partition.deny_qos)
        if not qos and names:
            continue
        needed: list[tuple[str, object]] = []
        if not is_usual:
            needed.append(("account", association.account))
        if qos and qos[0] != default and (partition.allow_qos is not None or partition.deny_qos):
            needed.append(("qos", qos[0]))
        return needed
    have = dict.fromkeys(name for association in usable for name in association.qos)
    rule = _rule(partition.allow_qos, partition.deny_qos)
    return Omission(partition.name, f"QOS: it {rule}; you have {', '.join(have)}")


def _select_accepted(names: Sequence[str], allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in denied and (allowed is None or name in allowed)]


def _rule(allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> str:
    return f"takes {', '.join(allowed)}" if allowed is not None else f"refuses {', '.join(denied)}"


def _nodes(nodes: Sequence[NodeFacts]) -> tuple[tuple[tuple[str, object], ...], tuple[str, ...]]:
    """The keys ``nodes`` and ``node``, with comments."""
    notes: tuple[str, ...] = ()
    names_fit = all(is_name(feature, check_slurm_name) for node in nodes for feature in node.features)
    groups = _count_shapes(nodes, features=names_fit)
    if not names_fit:
        notes = ("features are left out: a site file cannot hold the name of one of them",)
    elif len(groups) > _MOST_GROUPS:
        groups = _count_shapes(nodes, features=False)
        notes = ("features are left out: they differ from node to node",)
    if len(groups) == 1:
        shape = next(iter(groups))
        return (("nodes", groups[shape]), ("node", _mapping(shape, features=bool(shape.features)))), notes
    features = any(shape.features for shape in groups)
    listed = [{"count": count, **_mapping(shape, features=features)} for shape, count in groups.items()]
    return (("nodes", listed),), notes


class _Shape(NamedTuple):
    cpus: int
    mem_mb: int | None
    gpus: int
    gpu_model: str | None
    gpu_models: tuple[str, ...]
    features: tuple[str, ...]


def _count_shapes(nodes: Sequence[NodeFacts], *, features: bool) -> Counter[_Shape]:
    groups: Counter[_Shape] = Counter()
    for node in nodes:
        model = node.gpu_model if node.gpu_model is not None and is_name(node.gpu_model) else None
        models = node.gpu_models if all(is_name(text.rpartition(":")[0]) for text in node.gpu_models) else ()
        shape = _Shape(node.cpus, node.mem_mb, node.gpus, model, models, node.features if features else ())
        groups[shape] += node.size
    return groups


def _mapping(shape: _Shape, *, features: bool) -> dict[str, object]:
    values: dict[str, object] = {"cpus": shape.cpus}
    if shape.mem_mb is not None:
        values["mem"] = format_megabytes(shape.mem_mb)
    if shape.gpu_models:
        values["gpu_models"] = shape.gpu_models
    elif shape.gpus:
        values["gpus"] = shape.gpus
    if shape.gpu_model is not None:
        values["gpu_model"] = shape.gpu_model
    if features:
        values["features"] = shape.features
    return values


def _preemption(partition: PartitionInfo, cluster: ClusterFacts) -> list[tuple[str, object]]:
    """``preemptible`` and ``grace``, where a partition of a higher tier takes these nodes."""
    mode = next((_PREEMPTS[m] for m in (partition.preempt_mode or "").split(",") if m in _PREEMPTS), None)
    if mode is None or cluster.config.preempt_type != "preempt/partition_prio" or partition.priority_tier is None:
        return []
    tier = partition.priority_tier
    shared = {name for node in cluster.nodes if partition.name in node.partitions for name in node.partitions}
    if not any(other.name in shared and (other.priority_tier or 0) > tier for other in cluster.partitions):
        return []
    return [("preemptible", mode), ("grace", f"{partition.grace_s}s" if partition.grace_s else None)]
