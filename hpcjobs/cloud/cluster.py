"""A site's ``cloud:`` section resolved against the rest of the site and the table of machine types."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.cloud.gcp import DEFAULT_FILESTORE_TIER
from hpcjobs.cloud.provider import Machine
from hpcjobs.cloud.section import PROVIDERS, PUBLIC_KEY, Cloud
from hpcjobs.errors import ConfigError, nearest, reason_of
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.yaml_file import read_yaml
from hpcjobs.site.yaml_text import line_of
from hpcjobs.units import memory_bytes

MACHINES = {machine.name: machine for provider in PROVIDERS.values() for machine in provider.machines}
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

    Raises:
        ConfigError: the site has no cloud section, or the section is wrong, contradicts the partitions, or requests
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
        machine=MACHINES[cloud.machine],
        head=MACHINES[cloud.head.machine],
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
    machine = MACHINES[cloud.machine]
    yield from _wrong_gpus(cloud, machine)
    if (name := _partition(site, cloud)) not in site.partitions:
        yield _Problem("cloud.partition", f"the site has no partition {name!r}", nearest(name, site.partitions))
    yield from _wrong_shape(cloud, machine, f"partitions.{name}", site.partitions[name])
    yield from _wrong_storage(site, cloud)
    yield from _wrong_network(cloud, machine)


def _unknown_machine(cloud: Cloud, key: str, name: str) -> Iterator[_Problem]:
    sold = {machine.name for machine in PROVIDERS[cloud.provider].machines}
    if name in sold:
        return
    if name in MACHINES:
        yield _Problem(key, f"{name} is a machine of {MACHINES[name].provider}, not of {cloud.provider}")
    yield _Problem(key, f"{cloud.provider} has no machine type {name!r}", nearest(name, sold))


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
