"""Slurm's configuration for a rented cluster: its nodes and partition are written as in the sandbox."""

from __future__ import annotations

from hpcjobs.cloud.cluster import Cluster
from hpcjobs.sandbox.models import Host
from hpcjobs.sandbox.slurm_files import node_line, partition_line

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
