"""The request for a sandbox, and the sandbox once it is up. Every value is frozen."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hpcjobs.site.models import NodeShape, Partition

PROCTRACK = ("linuxproc", "cgroup")
"""Slurm's ProctrackType. ``cgroup``, as on most clusters, signals only processes that slurmstepd started."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``sandbox up``; ``None`` means "not given"."""

    like: str | None = None
    """The site to copy: its name, the path of its file, or the path of a cluster's slurm.conf (``*.conf``)."""
    nodes: int | None = None
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    proctrack: str | None = None
    """How slurmd knows a job's processes: one of `PROCTRACK`, by default the first."""
    settings: dict[str, str] = {}
    """Settings of slurm.conf as another site has them, by name; an empty text leaves one out. From Python only."""
    partition_settings: dict[str, str] = {}
    """Partition -> additional settings of its line in slurm.conf (``Hidden=YES``). From Python only."""
    files: dict[str, str] = {}
    """Further files in the folder of slurm.conf (``job_submit.lua``), name -> text. From Python only."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the cluster."""

    name: str
    address: str
    shape: NodeShape


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster to build, resolved from a shape and a site."""

    site: str
    cluster: str
    """Slurm's ClusterName: lower-case letters, digits and underscores."""
    login: str
    """Host name of the controller."""
    hosts: tuple[Host, ...]
    partitions: dict[str, Partition]
    """With the node counts of the sandbox."""
    members: dict[str, tuple[str, ...]]
    """Partition -> names of its hosts."""
    qos: dict[str, str]
    """QOS -> longest time (``""``: the QOS sets no limit)."""
    accounts: tuple[str, ...]
    """The first one is the users' default."""
    features: tuple[str, ...]
    mpi: str
    modules: tuple[str, ...] = ()
    """The site's modules on its hosts: modulefiles without any effect."""
    proctrack: str
    settings: dict[str, str] = {}
    partition_settings: dict[str, str] = {}
    files: dict[str, str] = {}
    overlay: dict[str, Any]
    """Site fields that differ from the real site's, as ``Rehearsal.overlay`` wants them."""

    @property
    def has_accounting(self) -> bool:
        """Whether slurmdbd and its database are part of the cluster."""
        return self.settings.get("AccountingStorageType", "slurmdbd").endswith("slurmdbd")


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that is up."""

    root: str
    site: str
    slurm_conf: str
    shape: Shape
    hosts: tuple[Host, ...]
    partitions: dict[str, tuple[str, ...]]
    """Partition -> names of its hosts."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``up``: everything runs. ``damaged``: ``problems`` lists dead daemons and remains. ``down``: no remains."""

    state: Literal["up", "damaged", "down"]
    root: str
    sandbox: Sandbox | None = None
    problems: tuple[str, ...] = ()
    nodes: dict[str, str] = {}
    """Host -> state in sinfo's spelling (``idle``, ``mixed``, ``down*``)."""
