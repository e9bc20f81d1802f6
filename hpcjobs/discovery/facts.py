"""Facts that a cluster reports about itself, and the content of a new site file. Every value is frozen."""

from __future__ import annotations

from typing import NamedTuple


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
