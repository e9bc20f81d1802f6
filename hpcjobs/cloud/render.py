"""A resolved cluster as a folder of files: Terraform for plain machines, or the provider's own Slurm standard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import jinja2

from hpcjobs import __version__
from hpcjobs.cloud.provider import Kind, Value, assignments, gib, literal
from hpcjobs.cloud.section import PROVIDERS, Cluster
from hpcjobs.data import data_folder, plain_text
from hpcjobs.errors import ConfigError, HpcJobsError, RequestError, reason_of
from hpcjobs.files import make_folder, state_dir, write_beside
from hpcjobs.packing import Wheel, build_wheel
from hpcjobs.sandbox.layout import Host
from hpcjobs.sandbox.services import PACKAGES, node_line, partition_line

_SETTINGS = """\
ClusterName={name}
SlurmctldHost={name}-head
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
# A node that was taken away, or is still starting, comes back by itself.
ReturnToService=2
ResumeTimeout=1800
SlurmdTimeout=120
# What the machine type promises, not what is left of it beside the system.
SlurmdParameters=config_overrides
# Each job has the cores, memory and GPUs that it requested, and no more: cgroup.conf.
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
PrologFlags=Contain
MpiDefault={mpi}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=10
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={name}-head
AccountingStorageEnforce=associations
JobRequeue=1
EnforcePartLimits=ALL
"""

CGROUP_CONF = """\
# cgroup v2 on the images that are rented; v1 where a kernel has only that.
CgroupPlugin=autodetect
ConstrainCores=yes
ConstrainDevices=yes
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0"""


def worker_names(cluster: Cluster) -> tuple[str, ...]:
    """NAME-1 to NAME-(nodes.max); those not rented at the moment are down to Slurm."""
    return tuple(f"{cluster.name}-{number}" for number in range(1, cluster.cloud.nodes.max + 1))


def slurm_conf(cluster: Cluster) -> str:
    """slurm.conf, the same on every machine."""
    lines = [_SETTINGS.format(name=cluster.name, mpi=cluster.site.mpi or "pmix").rstrip()]
    if cluster.gpus:
        lines += ["GresTypes=gpu", "AccountingStorageTRES=gres/gpu"]
    names = worker_names(cluster)
    lines += [node_line(Host(name=name, address=name, shape=cluster.node.shape), ()) for name in names]
    lines.append(partition_line(cluster.partition, cluster.node, hosts=names, default=True))
    return "\n".join(lines)


def gres_conf(cluster: Cluster) -> str:
    """gres.conf: the device files of each worker's GPUs; empty for nodes without."""
    if not cluster.gpus:
        return ""
    devices = f"/dev/nvidia[0-{cluster.gpus - 1}]" if cluster.gpus > 1 else "/dev/nvidia0"
    kind = f" Type={cluster.node.gpu_model}" if cluster.node.gpu_model else ""
    return f"NodeName={','.join(worker_names(cluster))} Name=gpu{kind} File={devices}"


_HEAD_ONLY = ("slurmctld", "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server")
_WORKER_ONLY = ("slurmd",)
_BASE = (
    "ca-certificates", "curl", "gcc", "libopenmpi-dev", "nfs-common", "openmpi-bin", "openssh-client",
    "openssh-server", "procps", "python3-dev", "python3-venv", "slurm-client", "sudo",
)  # fmt: skip
_IGNORED = """\
# The state names everything that was built: keep it, and keep it to yourself.
*.tfstate*
.terraform/
"""
_APPLIED = """\
# All variables, for `hpcjobs cloud down`: what was typed when the cluster was built stands in its state.

output "variables" {{
  description = "What the cluster was built with."
  value = {{
{lines}
  }}
}}
"""
_ENDS_HERE = "SITE"
"""The line that ends the site file inside the start-up script."""


def render(cluster: Cluster, kind: Kind = "vms") -> dict[str, str]:
    """File name -> text of every file in the folder. No file is written.

    Raises RequestError: the provider has no such ``kind``. ConfigError: a line of the site file would end it inside the
    start-up script.
    """
    provider = PROVIDERS[cluster.cloud.provider]
    if kind not in provider.kinds:
        raise RequestError(f"no {kind} for {provider.name}", hint=f"use {' or '.join(provider.kinds)}")
    if kind == "soperator" and cluster.cloud.network.ssh_from and not cluster.cloud.network.open_to_world:
        raise RequestError(
            f"{cluster.site.path}: network.ssh_from cannot be kept by Soperator: its login node has a public address "
            "that anybody may try",
            hint="set network.open_to_world: true if that is acceptable, or use --kind vms",
        )
    folder = data_folder("templates") / "cloud"
    environment = _environment(folder)
    context = _context(cluster)
    if kind == "vms":
        modules = (folder / "common", folder / provider.name)
        texts = sorted((path for module in modules for path in module.glob("*.tf")), key=lambda path: path.name)
        files = {path.name: path.read_text(encoding="utf-8") for path in texts}
        declared = re.findall(r'^variable "(\w+)"', "".join(files.values()), re.MULTILINE)
        width = max(map(len, declared))
        lines = "\n".join(f"    {name:<{width}} = var.{name}" for name in declared)
        files = {"applied.tf": _APPLIED.format(lines=lines), **files}
        files["terraform.tfvars"] = assignments(terraform_values(cluster))
        context["nodes_script"] = environment.get_template("nodes.sh.j2").render(context).rstrip()
        files["bootstrap.sh"] = environment.get_template("bootstrap.sh.j2").render(context)
        files[".gitignore"] = _IGNORED
        files["README.md"] = environment.get_template("README.md.j2").render(context)
        return files
    names = sorted(path.name for path in (folder / kind).glob("*.j2"))
    return {n.removesuffix(".j2"): environment.get_template(f"{kind}/{n}").render(context) for n in names}


def _environment(folder: Path) -> jinja2.Environment:
    environment = plain_text(jinja2.FileSystemLoader(str(folder)))
    environment.filters["hcl"] = literal
    return environment


def _context(cluster: Cluster) -> dict[str, object]:
    cloud, site = cluster.cloud, cluster.site
    text = Path(site.path).read_text(encoding="utf-8").rstrip()
    if _ENDS_HERE in text.splitlines():
        raise ConfigError(f"{site.path}: a line that says {_ENDS_HERE} alone would end it in the start-up script")
    return {
        "cluster": cluster,
        "cloud": cloud,
        "provider": PROVIDERS[cloud.provider],
        "name": cluster.name,
        "version": __version__,
        "mount": cloud.shared.mount,
        "gpus": cluster.gpus,
        "slots": cluster.gpus or cluster.machine.cpus,
        "venv": site.environment.venv or "/opt/hpcjobs/venv",
        "packages": [*_BASE, *(p for p in PACKAGES if p not in _HEAD_ONLY + _WORKER_ONLY)],
        "head_packages": [*_HEAD_ONLY, *(["nfs-kernel-server"] if cloud.shared.kind == "nfs" else [])],
        "worker_packages": list(_WORKER_ONLY),
        "python_packages": cloud.packages or (),
        "wheel": wheel_of(cluster),
        "wheel_extras": "[train,digits,mpi]",
        "site_text": text,
        "slurm_conf": slurm_conf(cluster),
        "gres_conf": gres_conf(cluster),
        "cgroup_conf": CGROUP_CONF,
        "values": terraform_values(cluster),
        "shared_gb": gib(cloud.shared.size),
        "boot_disk_gb": gib(cloud.disk.size),
        "accelerator": terraform_values(cluster).get("gpu_type"),
    }


def terraform_values(cluster: Cluster) -> dict[str, Value]:
    """Variable -> value, without variables that the site leaves open (project, keys, networks)."""
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
        **PROVIDERS[cloud.provider].terraform_values(cluster),
    }


def default_folder(name: str) -> Path:
    """The default folder of cluster ``name`` for its files and Terraform state, in the user's state folder."""
    return state_dir() / "cloud" / name


def wheel_of(cluster: Cluster) -> Wheel | None:
    """The wheel that the machines wait for; None if the site lists packages."""
    return build_wheel() if cluster.cloud.packages is None else None


def write(files: Mapping[str, str], out: Path, wheel: Wheel | None = None) -> None:
    """Write ``files`` and ``wheel`` into ``out`` (0700), each in one step; other files, such as the state, stay.

    Raises HpcJobsError: the folder cannot be written.
    """
    try:
        make_folder(out)
        for name, text in files.items():
            write_beside(out / name, text, mode=0o700 if name.endswith(".sh") else 0o600)
        if wheel is not None:
            write_beside(out / wheel.name, wheel.content)
    except OSError as error:
        raise HpcJobsError(f"{out}: cannot be written: {reason_of(error)}") from error
