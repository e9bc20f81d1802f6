"""The ``cloud:`` section of a site: provider, machines, network and disks of a rented cluster.

The values of the section are checked here. `hpcjobs.cloud.cluster.resolve_cluster` compares them with the site's
partitions and with the provider's machine types.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Literal

from hpcjobs.cloud.gcp import GCP
from hpcjobs.cloud.nebius import NEBIUS
from hpcjobs.site.checks import check_amount
from hpcjobs.site.models import Frozen
from hpcjobs.units import memory_bytes

Provider = Literal["gcp", "nebius"]
PROVIDERS = {provider.name: provider for provider in (GCP, NEBIUS)}

PUBLIC_KEY = r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp\d+|sk-ssh-ed25519@openssh\.com) [A-Za-z0-9+/]+=* ?[\w@.: +-]*"
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}\Z")
_SYSTEM_FOLDERS = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var")
)
_SYSTEM_USERS = frozenset(
    ("root", "ubuntu", "slurm", "munge", "daemon", "nobody", "sshd", "syslog", "www-data", "mail")
)
"""Users of Ubuntu's image, and of the packages of Slurm."""
_PRIVATE = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")


def _check_size(field: str, value: str) -> None:
    try:
        size = memory_bytes(value)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    if size < 1 << 30:
        raise ValueError(f"{field} must be at least 1G, not {value!r}")


_PROVIDER_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,199}\Z", re.ASCII)


class CloudGpu(Frozen, frozen=True, kw_only=True):
    """The GPUs of one node."""

    model: str
    """``gpu_model`` of the partition's node (``t4``, ``h100``)."""
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be positive, not {self.count}; leave gpu out for nodes without")


class NodeCount(Frozen, frozen=True, kw_only=True):
    """How many nodes the cluster may have; ``hpcjobs cloud up`` rents ``min`` of them unless it is given a number."""

    max: int
    min: int = 1

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ValueError(f"min must be positive, not {self.min}")
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")


class Disk(Frozen, frozen=True, kw_only=True):
    """The boot disk of a node."""

    size: str = "100G"
    type: str | None = None
    """The provider's name for it; ``None``: the provider's ordinary SSD."""
    encryption_key: str | None = None
    """Self link of a key of yours (GCP); ``None``: encrypted with a key of the provider's."""

    def __post_init__(self) -> None:
        _check_size("size", self.size)
        key = self.encryption_key
        if key is not None and not re.fullmatch(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+", key):
            raise ValueError(
                f"encryption_key {key!r}: the key's name, projects/P/locations/L/keyRings/R/cryptoKeys/K, never a key"
            )


class HeadSection(Frozen, frozen=True, kw_only=True):
    """The node people log in to: it runs Slurm's controller, and NFS where that is the shared filesystem."""

    machine: str
    image: str | None = None
    """``None``: the provider's Ubuntu without GPU driver."""
    hour: float | None = None
    """Its price in the currency of ``prices``, for the estimate."""

    def __post_init__(self) -> None:
        check_amount(self.hour, "hour")


class Shared(Frozen, frozen=True, kw_only=True):
    """The filesystem all nodes see: homes, run folders, checkpoints."""

    kind: Literal["nfs", "filestore", "virtiofs"]
    """``nfs``: a disk of the head, exported. ``filestore``: GCP's. ``virtiofs``: Nebius'."""
    mount: str
    size: str
    tier: str | None = None
    """Filestore's tier; ``None``: ZONAL, the cheapest with NFSv4.1, which has file locks between nodes."""

    def __post_init__(self) -> None:
        _check_size("size", self.size)
        if not re.fullmatch(r"(/[A-Za-z0-9_][\w.-]*)+", self.mount, re.ASCII):
            raise ValueError(f"mount {self.mount!r}: an absolute path of letters, digits, '_', '.', '-'")
        if self.mount.split("/")[1] in _SYSTEM_FOLDERS:
            raise ValueError(
                f"mount {self.mount!r} would hide a folder of the system; use /shared, /mnt/NAME or the like"
            )
        if self.tier is not None and self.kind != "filestore":
            raise ValueError(f"tier belongs to filestore, not to {self.kind}")


class Network(Frozen, frozen=True, kw_only=True):
    """The cluster's own network, and who may come in."""

    cidr: str = "10.20.0.0/24"
    subnet: str | None = None
    """Nebius: an existing subnet (``vpcsubnet-...``) instead of a network of the cluster's own."""
    fabric: str | None = None
    """Nebius: the InfiniBand fabric of the GPU cluster (``fabric-2``)."""
    ssh_from: tuple[str, ...] = ()
    """Networks that may reach the head by ssh; none: given when it is built."""
    open_to_world: bool = False
    """Allows ``ssh_from`` to hold more than 2^24 addresses (IPv4), 0.0.0.0/0 included."""

    def __post_init__(self) -> None:
        _check_network("cidr", self.cidr)
        own = ipaddress.ip_network(self.cidr)
        if own.version != 4 or not any(own.subnet_of(private) for private in _PRIVATE):
            allowed = ", ".join(map(str, _PRIVATE))
            raise ValueError(f"cidr {self.cidr}: the cluster's own network is a part of {allowed}")
        for network in self.ssh_from:
            _check_network("ssh_from", network)
        if self.is_open and not self.open_to_world:
            raise ValueError(
                f"ssh_from {', '.join(self.ssh_from)} lets a large part of the world try: networks of at most "
                "2^24 addresses (IPv6: /32) are allowed; name yours, or set open_to_world: true"
            )

    @property
    def is_open(self) -> bool:
        """Whether ``ssh_from`` holds more addresses than one organisation has."""
        networks = [ipaddress.ip_network(text) for text in self.ssh_from]
        v4 = ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv4Network))
        v6 = ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv6Network))
        return sum(n.num_addresses for n in v4) > 1 << 24 or sum(n.num_addresses for n in v6) > 1 << 96


def _check_network(field: str, value: str) -> None:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{field} {value!r} is no network: {error}; write 203.0.113.0/24, or /32 for one") from error


class Ssh(Frozen, frozen=True, kw_only=True):
    """The user who logs in, with the same uid on every node and a home on the shared filesystem."""

    user: str = "hpc"
    keys: tuple[str, ...] = ()
    """Public keys, or files that hold one; none: given when it is built."""

    def __post_init__(self) -> None:
        if not _USER.match(self.user):
            raise ValueError(f"user {self.user!r}: a user name of small letters and digits")
        if self.user in _SYSTEM_USERS:
            raise ValueError(
                f"user {self.user!r}: the machines have a user of this name already; take another, such as hpc"
            )
        for key in self.keys:
            if "PRIVATE KEY" in key:
                raise ValueError("keys holds a private key: remove it here, replace it everywhere, give its .pub")
            if not re.fullmatch(PUBLIC_KEY, key) and not key.endswith(".pub"):
                raise ValueError(f"keys {key[:30]!r}: a public key (ssh-ed25519 AAAA...) or a file that ends in .pub")


class Budget(Frozen, frozen=True, kw_only=True):
    """The most to spend: ``amount``, in the currency of ``prices``, for ``hours`` of the whole cluster."""

    amount: float
    hours: float

    def __post_init__(self) -> None:
        for field in ("amount", "hours"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) > 0):
                raise ValueError(f"{field} must be a positive number, not {getattr(self, field)}")


class Quota(Frozen, frozen=True, kw_only=True):
    """The provider's limits for your project in this region; ``None``: not known."""

    cpus: int | None = None
    gpus: int | None = None
    disk: str | None = None


class Cloud(Frozen, frozen=True, kw_only=True):
    """A rented cluster: a head and equal worker nodes."""

    provider: Provider
    region: str
    zone: str | None = None
    project: str | None = None
    """Project the cluster belongs to; ``None``: given when it is built."""
    partition: str | None = None
    """Partition of these nodes; ``None``: the default partition."""
    machine: str
    gpu: CloudGpu | None = None
    nodes: NodeCount
    head: HeadSection
    image: str | None = None
    """Image (GCP) or image family (Nebius) of the nodes; ``None``: Ubuntu 24.04, with NVIDIA's driver for GPUs."""
    disk: Disk = Disk()
    shared: Shared
    network: Network = Network()
    ssh: Ssh = Ssh()
    spot: bool = False
    """Cheaper nodes that may be taken away at any moment."""
    reservation: str | None = None
    """Name (GCP) or capacity block group (Nebius) of capacity you reserved."""
    secure_boot: bool = True
    """GCP: load only signed kernel modules. Set to false for an image that builds its driver at the first start."""
    scopes: tuple[str, ...] = ("logging.write", "monitoring.write")
    """GCP: access scopes of programs on the nodes, for the nodes' service account."""
    packages: tuple[str, ...] | None = None
    """Packages that pip installs on the nodes; ``None``: this hpcjobs with the extras of its trainers."""
    horovod: bool = False
    """Whether each node builds Horovod for its torch and MPI, after Slurm has started."""
    labels: dict[str, str] = {}
    quota: Quota = Quota()
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.spot and self.reservation is not None:
            raise ValueError("reservation and spot exclude each other: reserved capacity is not taken away")
        self._check_names()
        PROVIDERS[self.provider].check(self)
        for name, value in self.labels.items():
            if not _LABEL_KEY.match(name) or not _LABEL_VALUE.match(value):
                raise ValueError(f"labels {name}={value}: small letters, digits, '_', '-', starting with a letter")

    def _check_names(self) -> None:
        """Check the names for illegal characters, which Terraform would refuse only at the first apply."""
        names = {
            "region": self.region,
            "project": self.project,
            "image": self.image,
            "disk.type": self.disk.type,
            "head.image": self.head.image,
            "network.subnet": self.network.subnet,
            "network.fabric": self.network.fabric,
        }
        for field, name in names.items():
            if name is not None and not _PROVIDER_NAME.match(name):
                raise ValueError(f"{field} {name!r}: letters, digits and '._/:-', at most 200")
