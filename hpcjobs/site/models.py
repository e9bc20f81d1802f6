"""What a site file may say. Every value is frozen; ``None`` means "not said"."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hpcjobs.site.containers import Containers
from hpcjobs.site.frozen import Frozen as Frozen
from hpcjobs.site.jupyter import Jupyter
from hpcjobs.units import memory_bytes, slurm_time, walltime_s

GpuRequest = Literal["gres", "gpus-per-node", "gpus-per-task", "none"]
MemoryRequest = Literal["mem", "mem-per-cpu", "none"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\Z", re.ASCII)


_LONGEST_NAME = 180
"""A file name has 255 characters, and more than the job's name stands in those of a run."""


def check_name(value: str, what: str) -> None:
    """Refuse a ``what`` that would need quoting in a file name or a Slurm option (ValueError)."""
    if not _NAME.match(value):
        raise ValueError(f"{what} {value!r}: use letters, digits, '_', '.', '-', and start with a letter or digit")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"{what} {value[:20]}...: {len(value)} characters, at most {_LONGEST_NAME} are allowed")


def _check_memory(value: str, field: str) -> None:
    try:
        memory_bytes(value)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


class Resources(Frozen, frozen=True):
    """What a job asks Slurm for: each field is one long option of sbatch, spelled with underscores.

    A field left out keeps the value of the layer below (site < partition < spec file < flags); an
    explicit null clears it. To support a further sbatch option, add a field here.
    """

    partition: str | None | UnsetType = UNSET
    nodes: int | None | UnsetType = UNSET
    ntasks_per_node: int | None | UnsetType = UNSET
    cpus_per_task: int | None | UnsetType = UNSET
    gpus_per_node: int | None | UnsetType = UNSET
    mem: str | None | UnsetType = UNSET
    mem_per_cpu: str | None | UnsetType = UNSET
    mem_per_gpu: str | None | UnsetType = UNSET
    time: str | None | UnsetType = UNSET
    time_min: str | None | UnsetType = UNSET
    account: str | None | UnsetType = UNSET
    qos: str | None | UnsetType = UNSET
    constraint: str | None | UnsetType = UNSET
    exclusive: bool | str | None | UnsetType = UNSET
    array: str | None | UnsetType = UNSET
    dependency: str | None | UnsetType = UNSET
    begin: str | None | UnsetType = UNSET
    deadline: str | None | UnsetType = UNSET
    nodelist: str | None | UnsetType = UNSET
    exclude: str | None | UnsetType = UNSET
    reservation: str | None | UnsetType = UNSET
    licenses: str | None | UnsetType = UNSET
    gres: str | None | UnsetType = UNSET
    tmp: str | None | UnsetType = UNSET
    clusters: str | None | UnsetType = UNSET
    comment: str | None | UnsetType = UNSET
    wckey: str | None | UnsetType = UNSET
    mail_type: str | None | UnsetType = UNSET
    mail_user: str | None | UnsetType = UNSET
    nice: int | None | UnsetType = UNSET
    priority: int | None | UnsetType = UNSET
    hold: bool | None | UnsetType = UNSET
    requeue: bool | None | UnsetType = UNSET
    open_mode: Literal["append", "truncate"] | None | UnsetType = UNSET
    signal: str | None | UnsetType = UNSET
    switches: str | None | UnsetType = UNSET
    contiguous: bool | None | UnsetType = UNSET
    oversubscribe: bool | None | UnsetType = UNSET
    overcommit: bool | None | UnsetType = UNSET
    spread_job: bool | None | UnsetType = UNSET
    core_spec: int | None | UnsetType = UNSET
    sockets_per_node: int | None | UnsetType = UNSET
    cores_per_socket: int | None | UnsetType = UNSET
    threads_per_core: int | None | UnsetType = UNSET
    ntasks_per_socket: int | None | UnsetType = UNSET
    ntasks_per_core: int | None | UnsetType = UNSET
    hint: str | None | UnsetType = UNSET
    distribution: str | None | UnsetType = UNSET
    cpu_freq: str | None | UnsetType = UNSET
    gpu_freq: str | None | UnsetType = UNSET
    network: str | None | UnsetType = UNSET
    power: str | None | UnsetType = UNSET
    prefer: str | None | UnsetType = UNSET
    no_kill: bool | None | UnsetType = UNSET
    profile: str | None | UnsetType = UNSET
    acctg_freq: str | None | UnsetType = UNSET
    bb: str | None | UnsetType = UNSET
    bbf: str | None | UnsetType = UNSET

    def __post_init__(self) -> None:
        for field in ("time", "time_min"):
            value = getattr(self, field)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, field, slurm_time(walltime_s(value)))
        for field in _MEMORY:
            value = getattr(self, field)
            if isinstance(value, str):
                _check_memory(value, field)
        for field in _COUNTS:
            value = getattr(self, field)
            if isinstance(value, int) and value < 1 - (field == "gpus_per_node"):
                raise ValueError(f"{field} must be positive, not {value}")
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, str) and (not value or any(ord(c) < 32 for c in value)):
                raise ValueError(f"{field} {value!r}: empty values, newlines and control characters are refused")


_MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
_COUNTS = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node")


class NodeShape(Frozen, frozen=True):
    """One node: CPUs as Slurm counts them, memory with a unit, GPUs."""

    cpus: int
    mem: str | None = None
    gpus: int = 0
    gpu_model: str | None = None
    """The GRES type Slurm knows the GPUs by (``a100``)."""

    def __post_init__(self) -> None:
        if self.mem is not None:
            _check_memory(self.mem, "mem")


class Partition(Frozen, frozen=True):
    """A partition: how many nodes, of which shape, under which limits."""

    node: NodeShape
    nodes: int
    """Nodes in the partition."""
    max_nodes: int | None = None
    """Nodes one job may have; ``None``: all of them."""
    max_time: str | None = None
    default: bool = False
    qos: tuple[str, ...] | None = None
    """QOS accepted here; ``None``: not restricted."""
    preemptible: Literal["requeue", "cancel"] | None = None
    """What happens to a job here whose nodes another partition wants; ``None``: nothing does."""
    grace: str | None = None
    """How long such a job has after SIGTERM before that happens."""
    defaults: Resources = Resources()

    def __post_init__(self) -> None:
        if self.max_time is not None:
            msgspec.structs.force_setattr(self, "max_time", slurm_time(walltime_s(self.max_time)))
        if self.grace is not None:
            walltime_s(self.grace)


class Environment(Frozen, frozen=True):
    """Where Python comes from on the node: at most one of conda and venv, after modules are loaded."""

    conda: str | None = None
    """Name or path of a conda environment."""
    conda_init: str | None = None
    """Script that defines ``conda`` (default: found through ``conda info --base``)."""
    venv: str | None = None

    def __post_init__(self) -> None:
        if self.conda is not None and self.venv is not None:
            raise ValueError("environment: say conda or venv, not both")


class Prices(Frozen, frozen=True):
    """Money per hour, in ``currency``; used by reports, never by submission."""

    cpu_hour: float | None = None
    gpu_hour: float | None = None
    node_hour: float | None = None
    currency: str = "EUR"


class Watts(Frozen, frozen=True):
    """Electrical power in watts, for the modelled energy of reports."""

    cpu: float | None = None
    """Per allocated CPU."""
    gpu: float | None = None
    """Per allocated GPU."""
    node_idle: float | None = None


class Site(Frozen, frozen=True):
    """One cluster or machine. The file's stem is its name."""

    name: str = ""
    """Set by the loader from the file's stem."""
    path: str = ""
    """Set by the loader: the file it was read from."""
    rehearsal: bool = False
    """Set by the loader: a sandbox plays this site."""
    slurm_conf: str | None = None
    """SLURM_CONF for every Slurm command, where the default is not the right one."""
    description: str = ""
    scheduler: Literal["slurm", "local"] = "slurm"
    partitions: dict[str, Partition] = {}
    defaults: Resources = Resources()
    qos: dict[str, str] = {}
    """QOS name -> longest time it allows (``""``: no limit of its own)."""
    launchers: tuple[str, ...] | None = None
    """Launchers that work here, the default one first; ``None``: all of the scheduler's."""

    gpu_request: GpuRequest = "gpus-per-node"
    memory_request: MemoryRequest = "mem"
    directives: dict[str, str | None] = {}
    """Slurm option -> null (never send it) or a replacement in which ``{value}`` stands for the value."""
    extra_directives: tuple[str, ...] = ()
    """Options sent as they are, without the leading ``--``."""

    max_submit_jobs: int | None = None
    """Jobs you may have in the queue (MaxSubmitJobs of account or QOS), array tasks counted one by one; a sweep
    submits what is beyond it later."""

    mpi: str | None = None
    """``srun --mpi`` type; ``None``: the cluster's default."""
    interface: str | None = None
    """Network interface of the fast network, for gloo and NCCL."""
    address_suffix: str = ""
    """Appended to a host name to reach it over the fast network (``-ib``)."""

    module_init: str | None = None
    modules: tuple[str, ...] = ()
    env: dict[str, str] = {}
    setup: tuple[str, ...] = ()
    """Shell lines run by the batch script after modules and environment, before ``env`` is set."""
    environment: Environment = Environment()
    python: str | None = None
    """Python on the node; ``None``: the one that runs hpcjobs, or ``python`` of the environment."""
    containers: Containers = Containers()
    jupyter: Jupyter = Jupyter()

    run_root: str = "runs"
    """Where run folders are made; ``$VARIABLES`` and ``~`` are expanded at submission."""
    scratch: str | None = None
    """Node-local scratch, expanded on the node."""
    node_local: tuple[str, ...] = ()
    """Folders that each node has for itself: no run folder may lie in one."""
    login: str | None = None
    retries: str | None = None
    """How often jobs are started again here unless they say otherwise (``on``, ``node=5,error=1``)."""
    signal_before: str | None = None
    """How long before its time limit a job is told to save (``5m``); ``None``: from what it measures."""
    prices: Prices = Prices()
    watts: Watts = Watts()
    cloud: dict[str, Any] | None = None
    """Where and how the cluster is rented: read by `hpcjobs.cloud` alone, whose types no submission has to load."""

    def __post_init__(self) -> None:
        if self.scheduler == "slurm" and not self.partitions:
            raise ValueError("a slurm site needs at least one partition")
        if sum(p.default for p in self.partitions.values()) > 1:
            raise ValueError("only one partition can have default: true")
        for name in self.partitions:
            check_name(name, "partition")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"env {name!r} is no name of an environment variable")

    @property
    def default_partition(self) -> str | None:
        """The partition marked ``default: true``, else the first one named."""
        marked = [name for name, partition in self.partitions.items() if partition.default]
        return next(iter(marked or self.partitions), None)
