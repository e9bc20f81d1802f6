"""The keys of a partition: nodes of one shape or several, and the limits of its jobs."""

import re
from typing import Literal

from msgspec.structs import force_setattr

from hpcjobs.site.checks import (
    Frozen,
    check_count,
    check_duration,
    check_memory,
    check_name,
    check_slurm_name,
    check_time_limit,
)
from hpcjobs.site.resources import Resources, check_fields, gpus_and_model
from hpcjobs.units import memory_bytes

_GPUS_OF_NODE = re.compile(
    r"gpu(?::(?P<model>(?=[^:()=]*[A-Za-z])[^:()=]+|\d+(?=:)))?(?::(?P<count>\d+)(?P<kilo>K?))?\Z",
    re.ASCII | re.IGNORECASE,
)
_NOT_COUNTED = re.compile(r"\([^)]*\)|:no_consume\b")
"""Sockets or indices of a GRES (``gpu:a100:4(S:0-1)``), and its flag."""


def count_gpus(gres: str) -> dict[str | None, int]:
    """The GPUs of a node by type, from its Gres in Slurm: ``gpu:a100:4(S:0-1),nvme:1``; None: without a type."""
    counts: dict[str | None, int] = {}
    for part in _NOT_COUNTED.sub("", gres).split(","):
        if match := _GPUS_OF_NODE.match(part.strip()):
            count = int(match["count"] or 1) * (1024 if match["kilo"] else 1)
            counts[match["model"]] = counts.get(match["model"], 0) + count
    return counts


class NodeShape(Frozen, frozen=True):
    """One node: CPUs, memory and GPUs in Slurm's count (without specialized cores and MemSpecLimit)."""

    cpus: int
    """CPUs that jobs can have."""
    mem: str | int | None = None
    """With a unit, or the megabytes that ``sinfo -o %m`` prints."""
    gpus: int = 0
    """GPUs that jobs can have."""
    gpu_model: str | None = None
    """The GRES type Slurm knows the GPUs by (``a100``)."""
    gpu_models: tuple[str, ...] = ()
    """``TYPE:COUNT`` of each GRES type, in place of ``gpus`` and ``gpu_model``, where a node has several (MIG slices):
    ``[a100:2, 1g.5gb:14]``."""
    features: tuple[str, ...] | None = None
    """Features that ``constraint`` can name; ``None``: not known."""

    def __post_init__(self) -> None:
        check_count(self.cpus, "cpus")
        check_count(self.gpus, "gpus", least=0)
        self._count_models()
        check_memory(self, "mem")
        for name in filter(None, (self.gpu_model,)):
            check_name(name, "gpu_model")
        for name in self.features or ():
            check_slurm_name(name, "features")

    def _count_models(self) -> None:
        """Set ``gpus`` to the GPUs of all types."""
        counts = self.gpu_counts
        if not counts:
            return
        if len(counts) < len(self.gpu_models):
            raise ValueError(f"gpu_models: a type is named twice in {', '.join(self.gpu_models)}")
        total = sum(counts.values())
        if self.gpu_model is not None or self.gpus not in (0, total):
            raise ValueError(f"gpu_models: {total} GPUs of several types; leave gpus and gpu_model out")
        force_setattr(self, "gpus", total)

    @property
    def gpu_counts(self) -> dict[str, int]:
        """Type -> count of ``gpu_models``. Raises ValueError: one of them is no ``TYPE:COUNT``."""
        counts = {}
        for text in self.gpu_models:
            count, model = gpus_and_model(text, "gpu_models")
            if model is None:
                raise ValueError(f"gpu_models {text!r}: write TYPE:COUNT, such as 1g.5gb:7")
            counts[model] = count
        return counts

    @property
    def mem_bytes(self) -> int | None:
        """Memory; ``None``: not known."""
        return memory_bytes(str(self.mem)) or None if self.mem is not None else None


class NodeGroup(NodeShape, frozen=True):
    """Nodes of one shape."""

    count: int = 0
    """Number of nodes; required."""

    def __post_init__(self) -> None:
        check_count(self.count, "count")
        super().__post_init__()

    @property
    def shape(self) -> NodeShape:
        """One of the nodes."""
        return NodeShape(**{field: getattr(self, field) for field in NodeShape.__struct_fields__})


class Partition(Frozen, frozen=True):
    """A partition: number and shapes of its nodes, and its limits."""

    nodes: int | tuple[NodeGroup, ...]
    """Nodes in the partition, or, where they differ, the groups of equal ones."""
    node: NodeShape | None = None
    """The shape of all nodes, where ``nodes`` is a number."""
    min_nodes: int | None = None
    """Nodes one job must have at least."""
    max_nodes: int | None = None
    """Nodes one job may have; ``None``: all of them."""
    max_time: str | None = None
    """Longest time limit of a job; ``None``: no limit here."""
    max_mem_per_node: str | int | None = None
    """Memory that one job may have on a node, with a unit or in megabytes."""
    max_mem_per_cpu: str | int | None = None
    """Slurm gives a job that asks for more memory the CPUs that belong to it."""
    max_cpus_per_node: int | None = None
    """CPUs that jobs of this partition may have on a node."""
    default: bool = False
    """The partition of jobs that name none; without such a mark, the first one."""
    qos: tuple[str, ...] | None = None
    """QOS accepted here; ``None``: not restricted."""
    accounts: tuple[str, ...] | None = None
    """Accounts accepted here; ``None``: not restricted."""
    required: tuple[str, ...] = ()
    """Options that each job names here (``account``, ``qos``, ``time``): without one it is refused."""
    preemptible: Literal["requeue", "cancel", "suspend"] | None = None
    """Effect on a job here if another partition needs its nodes; ``None``: no effect."""
    grace: str | None = None
    """How long such a job has after SIGTERM before that happens."""
    defaults: Resources = Resources()
    """Default requests of jobs in this partition; they win over the site's ``defaults``."""

    def __post_init__(self) -> None:
        if isinstance(self.nodes, int):
            check_count(self.nodes, "nodes")
            if self.node is None:
                raise ValueError("node: what a node is like is missing, such as node: {cpus: 64, mem: 256G}")
        elif not self.nodes:
            raise ValueError("nodes: at least one group of nodes is needed, such as [{count: 4, cpus: 64}]")
        elif self.node is not None:
            raise ValueError("node or groups in nodes, not both: write nodes: 4 with node, or nodes: [{count: 4, …}]")
        for field in ("min_nodes", "max_nodes", "max_cpus_per_node"):
            if (count := getattr(self, field)) is not None:
                check_count(count, field)
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}")
        for field in ("max_mem_per_node", "max_mem_per_cpu"):
            check_memory(self, field)
        check_fields(self.required, "required")
        check_time_limit(self, "max_time")
        check_duration(self.grace, "grace")

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The nodes by shape."""
        if not isinstance(self.nodes, int):
            return self.nodes
        assert self.node is not None
        return (NodeGroup(count=self.nodes, **{f: getattr(self.node, f) for f in NodeShape.__struct_fields__}),)

    @property
    def shape(self) -> NodeShape:
        """The nodes' shape; of several, the first."""
        return self.groups[0].shape

    @property
    def node_count(self) -> int:
        """Nodes of all shapes."""
        return sum(group.count for group in self.groups)

    @property
    def gpu_model(self) -> str | None:
        """The model that all GPUs here are; ``None``: not known, or several."""
        models = {group.gpu_model for group in self.groups if group.gpus}
        return models.pop() if len(models) == 1 else None


def describe_nodes(partition: Partition) -> str:
    """The nodes of a partition for people: ``8 nodes of 64 CPUs, 512G, 4 GPUs a100``; shapes are joined by ``;``."""
    shapes = []
    for group in partition.groups:
        models = ", ".join(group.gpu_models) or group.gpu_model or ""
        gpus = f"{group.gpus} GPU{'s' * (group.gpus > 1)} {models}".rstrip() if group.gpus else None
        memory = None if group.mem is None else f"{group.mem}M" if isinstance(group.mem, int) else group.mem
        parts = ", ".join(filter(None, (f"{group.cpus} CPUs", memory, gpus)))
        shapes.append(f"{group.count} nodes of {parts}" if group.count else parts)
    return "; ".join(shapes)
