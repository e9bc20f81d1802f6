"""Nebius. Machines: its page "platforms and presets"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpcjobs.cloud.provider import CloudProvider, Level, Machine, Value

if TYPE_CHECKING:
    from hpcjobs.cloud.section import Cloud, Cluster

_UBUNTU = "ubuntu24.04-driverless"
_UBUNTU_NVIDIA = "ubuntu24.04-cuda13.0"


def _list_machines() -> list[Machine]:
    cpu = [
        Machine(f"{platform}/{n}vcpu-{4 * n}gb", n, 4 * n)
        for platform in ("cpu-d3", "cpu-e2")
        for n in (2, 4, 8, 16, 32, 48, 64, 80)
        if (platform, n) != ("cpu-d3", 2)
    ]
    gpu = [
        Machine("gpu-l40s-a/1gpu-8vcpu-32gb", 8, 32, "l40s", 1),
        Machine("gpu-h100-sxm/1gpu-16vcpu-200gb", 16, 200, "h100", 1),
        Machine("gpu-h100-sxm/8gpu-128vcpu-1600gb", 128, 1600, "h100", 8, fabric=True),
        Machine("gpu-h200-sxm/1gpu-16vcpu-200gb", 16, 200, "h200", 1),
        Machine("gpu-h200-sxm/8gpu-128vcpu-1600gb", 128, 1600, "h200", 8, fabric=True),
        Machine("gpu-b200-sxm/8gpu-160vcpu-1792gb", 160, 1792, "b200", 8, fabric=True),
    ]
    return cpu + gpu


def _check(cloud: Cloud) -> None:
    for field, name, prefix in (
        ("project", cloud.project, "project-"),
        ("network.subnet", cloud.network.subnet, "vpcsubnet-"),
    ):
        if name is not None and not name.startswith(prefix):
            raise ValueError(f"{field} {name!r}: an id that starts with {prefix}")
    if cloud.zone is not None:
        raise ValueError("zone: a Nebius region has none; leave it out")
    if cloud.shared.kind == "filestore":
        raise ValueError("shared: filestore is GCP's; Nebius has virtiofs and nfs")
    if cloud.disk.encryption_key is not None:
        raise ValueError("disk: Nebius encrypts with keys of its own; leave encryption_key out")


def _make_values(cluster: Cluster) -> dict[str, Value]:
    cloud = cluster.cloud
    platform, _, preset = cloud.machine.partition("/")
    head_platform, _, head_preset = cloud.head.machine.partition("/")
    return {
        "platform": platform,
        "preset": preset,
        "image_family": cloud.image or (_UBUNTU_NVIDIA if cluster.gpus else _UBUNTU),
        "head_platform": head_platform,
        "head_preset": head_preset,
        "head_image_family": cloud.head.image or _UBUNTU,
        "fabric": cloud.network.fabric,
        "boot_disk_type": cloud.disk.type or "NETWORK_SSD",
        "subnet": cloud.network.subnet,
    }


def _describe_security(cloud: Cloud) -> Iterator[tuple[Level, str, str]]:
    yield "note", "identity", "machines have no service account"
    yield "note", "shielded VM", "Nebius has no such setting"


def _find_arguments(environ: Mapping[str, str]) -> list[str]:
    has_account = "NB_SA_ID" in environ and "NEBIUS_IAM_TOKEN" not in environ
    return ["-var", "service_account=true"] if has_account else []


NEBIUS = CloudProvider(
    name="nebius",
    kinds=("vms", "soperator"),
    machines=_list_machines(),
    check=_check,
    find_refused_name=lambda site: None,
    terraform_values=_make_values,
    describe_security=_describe_security,
    credentials=(
        "`NEBIUS_IAM_TOKEN`, or a service account's NB_SA_ID, NB_AUTHKEY_PUBLIC_ID and NB_AUTHKEY_PRIVATE_PATH with "
        "`-var service_account=true`"
    ),
    find_arguments=_find_arguments,
)
