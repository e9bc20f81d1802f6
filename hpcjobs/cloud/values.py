"""The Terraform variables of a resolved cluster, as ``variables*.tf`` of its provider declares them."""

from __future__ import annotations

from hpcjobs.cloud.cluster import Cluster
from hpcjobs.cloud.hcl import Value
from hpcjobs.cloud.machines import GCP_ACCELERATORS
from hpcjobs.cloud.section import DEFAULT_FILESTORE_TIER
from hpcjobs.units import memory_bytes

_GCP_UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
_GCP_UBUNTU_NVIDIA = (
    "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
)
_NEBIUS_UBUNTU = "ubuntu24.04-driverless"
_NEBIUS_UBUNTU_NVIDIA = "ubuntu24.04-cuda13.0"


def terraform_values(cluster: Cluster) -> dict[str, Value]:
    """Variable -> value; what the site leaves to whoever builds (project, keys, networks) is left out."""
    return _gcp(cluster) if cluster.cloud.provider == "gcp" else _nebius(cluster)


def _common(cluster: Cluster) -> dict[str, Value]:
    cloud = cluster.cloud
    values: dict[str, Value | None] = {
        "project": cloud.project,
        "ssh_from": list(cloud.network.ssh_from) or None,
        "ssh_keys": list(cluster.ssh_keys) or None,
        "open_to_world": cloud.network.open_to_world or None,
    }
    return {
        "name": cluster.name,
        **{name: value for name, value in values.items() if value is not None},
        "ssh_user": cloud.ssh.user,
        "first_job": f"-N {cloud.nodes.min} ddp --workload mnist",
        "nodes": cloud.nodes.min,
        "nodes_min": cloud.nodes.min,
        "nodes_max": cloud.nodes.max,
        "boot_disk_gb": gib(cloud.disk.size),
        "shared_kind": cloud.shared.kind,
        "shared_gb": gib(cloud.shared.size),
        "spot": cloud.spot,
        "reservation": cloud.reservation,
        "labels": cloud.labels,
    }


def _gcp(cluster: Cluster) -> dict[str, Value]:
    cloud = cluster.cloud
    attached = cluster.gpu_model if cluster.machine.gpus == 0 else None
    return _common(cluster) | {
        "region": cloud.region,
        "zone": cloud.zone,
        "machine_type": cloud.machine,
        "gpu_type": GCP_ACCELERATORS[attached] if attached else None,
        "gpu_count": cluster.gpus,
        "image": cloud.image or (_GCP_UBUNTU_NVIDIA if cluster.gpus else _GCP_UBUNTU),
        "head_machine_type": cloud.head.machine,
        "head_image": cloud.head.image or _GCP_UBUNTU,
        "boot_disk_type": cloud.disk.type or "pd-balanced",
        "kms_key": cloud.disk.encryption_key,
        "shared_tier": cloud.shared.tier or DEFAULT_FILESTORE_TIER,
        "cidr": cloud.network.cidr,
        "secure_boot": cloud.secure_boot,
        "scopes": list(cloud.scopes),
    }


def _nebius(cluster: Cluster) -> dict[str, Value]:
    cloud = cluster.cloud
    platform, _, preset = cloud.machine.partition("/")
    head_platform, _, head_preset = cloud.head.machine.partition("/")
    return _common(cluster) | {
        "platform": platform,
        "preset": preset,
        "image_family": cloud.image or (_NEBIUS_UBUNTU_NVIDIA if cluster.gpus else _NEBIUS_UBUNTU),
        "head_platform": head_platform,
        "head_preset": head_preset,
        "head_image_family": cloud.head.image or _NEBIUS_UBUNTU,
        "fabric": cloud.network.fabric,
        "boot_disk_type": cloud.disk.type or "NETWORK_SSD",
        "subnet": cloud.network.subnet,
    }


def gib(size: str) -> int:
    """Whole GiB, rounded up."""
    return -(-memory_bytes(size) // (1 << 30))
