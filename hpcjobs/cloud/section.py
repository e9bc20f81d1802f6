"""The ``cloud:`` section of a site: provider, machines, network and disks of a rented cluster.

`resolve_cluster` compares it with the site's partitions and with the provider's machine types.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from hpcjobs.cloud.gcp import DEFAULT_FILESTORE_TIER, GCP
from hpcjobs.cloud.nebius import NEBIUS
from hpcjobs.cloud.provider import Machine
from hpcjobs.errors import ConfigError, nearest, reason_of
from hpcjobs.site.checks import check_amount
from hpcjobs.site.models import Frozen, Partition, Site
from hpcjobs.site.yaml_file import read_yaml
from hpcjobs.site.yaml_text import line_of
from hpcjobs.units import memory_bytes

PROVIDERS = {provider.name: provider for provider in (GCP, NEBIUS)}
if TYPE_CHECKING:
    Provider = str
else:
    Provider = Literal[tuple(PROVIDERS)]

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


_BANDS = ((1024, 9984, 256), (10240, 102400, 2560))
_FILESTORE_GIB = {
    "BASIC_HDD": ((1024, 65433, 1),), "BASIC_SSD": ((2560, 65433, 1),),
    "ZONAL": _BANDS, "REGIONAL": _BANDS, "ENTERPRISE": ((1024, 10240, 256),),
}  # fmt: skip
"""Tier -> the sizes that Google sells: from, to, in steps of."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?\Z")
_RESERVED_ADDRESSES = 16
"""Addresses of a subnet for the provider, the head and the filesystem."""


class Cluster(NamedTuple):
    """The cluster to build, with every value resolved and checked."""

    site: Site
    cloud: Cloud
    machine: Machine
    head: Machine
    partition: str
    node: Partition
    ssh_keys: tuple[str, ...]
    """The public keys themselves; empty: given when it is built."""

    @property
    def name(self) -> str:
        """The name of the cluster and, with a number or ``-head`` after it, of its nodes."""
        return self.site.name

    @property
    def gpus(self) -> int:
        return self.cloud.gpu.count if self.cloud.gpu else 0

    @property
    def gpu_model(self) -> str | None:
        return self.cloud.gpu.model if self.cloud.gpu else None


class _ClusterFile(msgspec.Struct, frozen=True):
    """The cloud section of a site file; the other keys are ignored."""

    cloud: Cloud | None = None


class _Problem(NamedTuple):
    key: str
    message: str
    hint: str | None = None


def resolve_cluster(site: Site) -> Cluster:
    """The cluster that ``site`` describes.

    Raises ConfigError: the site has no cloud section, or the section is wrong, contradicts the partitions, or requests
    machines or sizes that the provider does not sell; names file, line and key.
    """
    path = Path(site.path)
    if site.cloud is None:
        raise ConfigError(
            f"{path}: site {site.name} has no cloud section", hint="`hpcjobs help cloud.md` shows an example"
        )
    cloud = read_yaml(path, _ClusterFile).cloud
    assert cloud is not None  # the loader found the key
    problem = next(_contradictions(site, cloud), None)
    if problem is not None:
        line = line_of(path.read_text(encoding="utf-8"), list(problem.key.split(".")))
        raise ConfigError(f"{path}:{line}: {problem.key}: {problem.message}", hint=problem.hint)
    partition = _partition(site, cloud)
    return Cluster(
        site=site,
        cloud=cloud,
        machine=_machine(cloud, cloud.machine),
        head=_machine(cloud, cloud.head.machine),
        partition=partition,
        node=site.partitions[partition],
        ssh_keys=tuple(_public_key(path, key) for key in cloud.ssh.keys),
    )


def _partition(site: Site, cloud: Cloud) -> str:
    return cloud.partition or site.default_partition or ""


def _contradictions(site: Site, cloud: Cloud) -> Iterator[_Problem]:
    """Yield each problem, the cause before its consequences: later checks rely on earlier ones."""
    if not _NAME.match(site.name):
        yield _Problem("cloud", f"the file's name {site.name!r} names the machines: small letters, digits and '-' only")
    if (refused := PROVIDERS[cloud.provider].find_refused_name(site.name)) is not None:
        yield _Problem("cloud", f"the file's name {site.name!r} {refused}")
    if not site.kind.has_nodes:
        yield _Problem("scheduler", f"a cloud cluster runs slurm, not {site.scheduler}")
    for key, name in (("cloud.machine", cloud.machine), ("cloud.head.machine", cloud.head.machine)):
        yield from _unknown_machine(cloud, key, name)
    machine = _machine(cloud, cloud.machine)
    yield from _wrong_gpus(cloud, machine)
    if (name := _partition(site, cloud)) not in site.partitions:
        yield _Problem("cloud.partition", f"the site has no partition {name!r}", nearest(name, site.partitions))
    yield from _wrong_shape(cloud, machine, f"partitions.{name}", site.partitions[name])
    yield from _wrong_storage(site, cloud)
    yield from _wrong_network(cloud, machine)


def _unknown_machine(cloud: Cloud, key: str, name: str) -> Iterator[_Problem]:
    provider = PROVIDERS[cloud.provider]
    if provider.find_machine(name) is not None:
        return
    for other in PROVIDERS.values():
        if other.find_machine(name) is not None:
            yield _Problem(key, f"{name} is a machine of {other.name}, not of {cloud.provider}")
    sold = [machine.name for machine in provider.machines]
    yield _Problem(key, f"{cloud.provider} has no machine type {name!r}", nearest(name, sold))


def _machine(cloud: Cloud, name: str) -> Machine:
    """The machine type, which ``_unknown_machine`` has checked."""
    return next(machine for machine in PROVIDERS[cloud.provider].machines if machine.name == name)


def _wrong_gpus(cloud: Cloud, machine: Machine) -> Iterator[_Problem]:
    if cloud.gpu is None:
        if machine.gpus:
            yield _Problem("cloud.machine", f"{machine.name} comes with {machine.gpus} x {machine.gpu_model}: set gpu")
        return
    counts = machine.gpu_counts(cloud.gpu.model)
    if not counts:
        models = [machine.gpu_model] if machine.gpu_model else [model for model, _ in machine.attachable]
        allowed = f"it may have {', '.join(models)}" if models else "it has no GPUs"
        yield _Problem("cloud.gpu.model", f"{machine.name} cannot have {cloud.gpu.model}: {allowed}")
    if cloud.gpu.count not in counts:
        allowed = " or ".join(str(count) for count in counts)
        yield _Problem("cloud.gpu.count", f"{machine.name} has {allowed} x {cloud.gpu.model}, not {cloud.gpu.count}")


def _wrong_shape(cloud: Cloud, machine: Machine, key: str, partition: Partition) -> Iterator[_Problem]:
    """Yield each difference between the partition's nodes and the machine that would be rented."""
    if len(partition.groups) > 1:
        yield _Problem(f"{key}.nodes", f"a rented cluster has machines of one type, not {len(partition.groups)}")
    node, gpu = partition.shape, cloud.gpu
    if node.cpus != machine.cpus:
        yield _Problem(f"{key}.node.cpus", f"{node.cpus}, but {machine.name} has {machine.cpus}")
    if node.mem_bytes is not None and node.mem_bytes > machine.mem_gib * (1 << 30):
        hint = "leave a few GiB for the system: Slurm drains a node that has less than its partition says"
        yield _Problem(f"{key}.node.mem", f"{node.mem}, but {machine.name} has {machine.mem_gib:g}G", hint)
    if node.gpus != (gpu.count if gpu else 0):
        yield _Problem(f"{key}.node.gpus", f"{node.gpus}, but cloud.gpu says {gpu.count if gpu else 'none'}")
    if gpu and node.gpu_model not in (None, gpu.model):
        yield _Problem(f"{key}.node.gpu_model", f"{node.gpu_model}, but cloud.gpu says {gpu.model}")
    if partition.node_count != cloud.nodes.max:
        yield _Problem(f"{key}.nodes", f"{partition.node_count}, but cloud.nodes.max says {cloud.nodes.max}")


def _wrong_storage(site: Site, cloud: Cloud) -> Iterator[_Problem]:
    shared = cloud.shared
    if not f"{site.run_root}/".startswith(f"{shared.mount}/"):
        yield _Problem("run_root", f"{site.run_root} is not on the shared filesystem, {shared.mount}")
    if shared.kind == "filestore":
        tier = shared.tier or DEFAULT_FILESTORE_TIER
        if tier not in _FILESTORE_GIB:
            yield _Problem("cloud.shared.tier", f"no tier {tier!r}", nearest(tier, _FILESTORE_GIB))
        bands, size = _FILESTORE_GIB[tier], memory_bytes(shared.size) / (1 << 30)
        if not any(least <= size <= most and (size - least) % step == 0 for least, most, step in bands):
            sizes = " or ".join(f"{least}G to {most}G in steps of {step}G" for least, most, step in bands)
            yield _Problem("cloud.shared.size", f"a {tier} filestore has {sizes}, not {shared.size}")
        if tier.startswith("BASIC_") and cloud.disk.encryption_key is not None:
            yield _Problem(
                "cloud.disk.encryption_key",
                f"a {tier} filestore cannot be encrypted with a key of yours",
                "use tier ZONAL, REGIONAL or ENTERPRISE, or leave encryption_key out",
            )


def _wrong_network(cloud: Cloud, machine: Machine) -> Iterator[_Problem]:
    room = ipaddress.ip_network(cloud.network.cidr).num_addresses - _RESERVED_ADDRESSES
    if cloud.nodes.max > room:
        bits = 32 - math.ceil(math.log2(cloud.nodes.max + _RESERVED_ADDRESSES))
        network = cloud.network.cidr.partition("/")[0]
        yield _Problem(
            "cloud.network.cidr",
            f"{cloud.network.cidr} has room for {max(room, 0)} nodes, not {cloud.nodes.max}",
            f"{network}/{bits} would do",
        )
    if cloud.network.fabric is not None and not machine.fabric:
        yield _Problem("cloud.network.fabric", f"{machine.name} has no InfiniBand: leave fabric out")


def _public_key(site_file: Path, key: str) -> str:
    """``key``, or the content of the file that it names, relative to the site file's folder."""
    if re.fullmatch(PUBLIC_KEY, key):
        return key
    path = site_file.parent / Path(key).expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{site_file}: cloud.ssh.keys: {path} cannot be read: {reason_of(error)}") from error
    if not re.fullmatch(PUBLIC_KEY, text):
        raise ConfigError(f"{site_file}: cloud.ssh.keys: {path} does not hold one public key of OpenSSH")
    return text
