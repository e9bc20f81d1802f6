"""Google Cloud. Machines: Google's pages "machine families" and "GPU machine types"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcjobs.cloud.provider import CloudProvider, Level, Machine, Value

if TYPE_CHECKING:
    from hpcjobs.cloud.section import Cloud, Cluster

DEFAULT_FILESTORE_TIER = "ZONAL"
_UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
_UBUNTU_NVIDIA = (
    "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
)
_INSTALL_DRIVER = """\
    local installer=/opt/google/cuda_installer.pyz
    mkdir -p /opt/google
    curl -fsSL https://storage.googleapis.com/compute-gpu-installation-us/installer/latest/cuda_installer.pyz -o "$installer"
    python3 "$installer" install_driver
"""  # noqa: E501
_ACCELERATORS = {
    "t4": "nvidia-tesla-t4",
    "v100": "nvidia-tesla-v100",
    "p100": "nvidia-tesla-p100",
    "l4": "nvidia-l4",
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
}
"""Our name of a GPU model -> GCP's accelerator type."""


def _list_general() -> list[Machine]:
    families = (("e2-standard", 4.0, (2, 4, 8, 16, 32)), ("n2-standard", 4.0, (2, 4, 8, 16, 32, 48, 64, 80)))
    return [Machine(f"{name}-{n}", n, n * gib) for name, gib, counts in families for n in counts]


def _list_n1() -> list[Machine]:
    """N1: the family to which GPUs can be attached; larger ones need more of them."""
    small = (("t4", (1, 2, 4)), ("p100", (1, 2, 4)), ("v100", (1, 2, 4, 8)))
    gpus = dict.fromkeys((1, 2, 4, 8), small) | {
        16: (("t4", (1, 2, 4)), ("p100", (1, 2, 4)), ("v100", (2, 4, 8))),
        32: (("t4", (2, 4)), ("p100", (2, 4)), ("v100", (4, 8))),
    }
    return [Machine(f"n1-standard-{n}", n, n * 3.75, attachable=models) for n, models in gpus.items()]


def _list_accelerated() -> list[Machine]:
    g2 = ((4, 16, 1), (8, 32, 1), (12, 48, 1), (16, 64, 1), (24, 96, 2), (32, 128, 1), (48, 192, 4), (96, 384, 8))
    a2 = (("1g", 12, 85, 1), ("2g", 24, 170, 2), ("4g", 48, 340, 4), ("8g", 96, 680, 8))
    return [
        *(Machine(f"g2-standard-{n}", n, gib, "l4", gpus) for n, gib, gpus in g2),
        *(Machine(f"a2-highgpu-{name}", n, gib, "a100", gpus) for name, n, gib, gpus in a2),
        *(Machine(f"a2-ultragpu-{name}", n, 2 * gib, "a100-80gb", gpus) for name, n, gib, gpus in a2),
        Machine("a3-highgpu-8g", 208, 1872, "h100", 8),
    ]


def _check(cloud: Cloud) -> None:
    if cloud.zone is None:
        raise ValueError(f"zone is missing: set one of {cloud.region} ({cloud.region}-a, ...)")
    if cloud.zone.rpartition("-")[0] != cloud.region:
        raise ValueError(f"zone {cloud.zone} is not in region {cloud.region}")
    if cloud.shared.kind == "virtiofs":
        raise ValueError("shared: virtiofs is Nebius'; GCP has nfs and filestore")
    if cloud.network.subnet is not None or cloud.network.fabric is not None:
        raise ValueError("network: subnet and fabric are Nebius'")


def _find_refused_name(site: str) -> str | None:
    account = f"{site}-nodes"[:30]
    return f"gives the service account {account!r}, which GCP refuses" if account.endswith("-") else None


def _make_values(cluster: Cluster) -> dict[str, Value]:
    cloud = cluster.cloud
    attached = cluster.gpu_model if cluster.machine.gpus == 0 else None
    return {
        "region": cloud.region,
        "zone": cloud.zone,
        "machine_type": cloud.machine,
        "gpu_type": _ACCELERATORS[attached] if attached else None,
        "gpu_count": cluster.gpus,
        "image": cloud.image or (_UBUNTU_NVIDIA if cluster.gpus else _UBUNTU),
        "head_machine_type": cloud.head.machine,
        "head_image": cloud.head.image or _UBUNTU,
        "boot_disk_type": cloud.disk.type or "pd-balanced",
        "kms_key": cloud.disk.encryption_key,
        "shared_tier": cloud.shared.tier or DEFAULT_FILESTORE_TIER,
        "cidr": cloud.network.cidr,
        "secure_boot": cloud.secure_boot,
        "scopes": list(cloud.scopes),
    }


def _describe_security(cloud: Cloud) -> Iterator[tuple[Level, str, str]]:
    yield "note", "identity", f"a service account without roles; scopes: {', '.join(cloud.scopes) or 'none'}"
    if "cloud-platform" in cloud.scopes:
        yield "warning", "identity", "scope cloud-platform: every program may do what the account may"
    if cloud.secure_boot:
        yield "note", "shielded VM", "secure boot, vTPM, integrity"
    else:
        yield "warning", "shielded VM", "vTPM and integrity, but no secure boot"


GCP = CloudProvider(
    name="gcp",
    kinds=("vms", "toolkit"),
    machines=[*_list_general(), *_list_n1(), *_list_accelerated()],
    check=_check,
    find_refused_name=_find_refused_name,
    terraform_values=_make_values,
    describe_security=_describe_security,
    credentials="`gcloud auth application-default login`",
    find_arguments=lambda environ: [],
    install_driver=_INSTALL_DRIVER,
)
