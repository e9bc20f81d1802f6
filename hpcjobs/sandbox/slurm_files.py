"""The text of Slurm's configuration files for a layout. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.layout import Host, Layout
from hpcjobs.sandbox.network import CONTROLLER
from hpcjobs.site.models import NodeShape, Partition
from hpcjobs.site.resources import gpus_and_model
from hpcjobs.units import memory_bytes, walltime_s

CONTROLLER_PORT, NODE_PORT, ACCOUNTING_PORT, DATABASE_PORT = 17817, 17818, 17819, 17306
PORTS = (CONTROLLER_PORT, NODE_PORT, ACCOUNTING_PORT, DATABASE_PORT)

# Waits are short: a sandbox is for trying things out, and its hosts are never far away.
_SETTINGS = """\
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts no earlier than cred_expire after it was put back.
AuthInfo=socket={munge},cred_expire=10
# Only on the bridge: a Slurm that this machine has beside the sandbox keeps its addresses.
CommunicationParameters=NoCtldInAddrAny
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmctldPidFile={root}/ctld/slurmctld.pid
SlurmdPidFile={root}/nodes/%n/slurmd.pid
StateSaveLocation={root}/ctld
SlurmdSpoolDir={root}/nodes/%n/spool
SlurmctldTimeout=30
SlurmdTimeout=60
# Seconds between SIGTERM and SIGKILL for a job at its end (30 by default).
KillWait=10
# Longer than that: a step's end that is not answered in time is requested again a minute later, and would then
# hit the next attempt of a requeued job.
MessageTimeout=30
MinJobAge=300
# No mail leaves a sandbox.
MailProg=/bin/true
ReturnToService=2
# A node may claim more CPUs and memory than this machine has.
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
TaskProlog={task_prolog}
JobRequeue=1
MaxArraySize=1001
MaxJobCount=20000
MpiDefault={mpi}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,bf_continue
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={controller}
AccountingStoragePort={dbd}
# The way to slurmdbd takes its munge from here, not from AuthInfo.
AccountingStoragePass={munge}
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment,job_script
EnforcePartLimits=ALL
"""

TASK_PROLOG = """\
#!/bin/sh
# The hosts of a sandbox share this machine's cores: who spins while waiting keeps those who are waited for from them.
[ -n "${OMP_WAIT_POLICY+x}" ] || echo export OMP_WAIT_POLICY=passive
[ -n "${OMPI_MCA_mpi_yield_when_idle+x}" ] || echo export OMPI_MCA_mpi_yield_when_idle=1
"""

CGROUPS_ARE_ASKED_FOR = (24, 5)
"""From this version on slurmd can do without the machine's cgroups, and needs a setting for it."""


def slurm_conf(layout: Layout, folder: Folder) -> str:
    """slurm.conf: the settings of every sandbox, then the nodes and partitions of this one."""
    settings = _SETTINGS.format(
        munge=folder.munge_socket,
        root=folder.root,
        mpi=layout.mpi,
        task_prolog=folder.task_prolog,
        proctrack=layout.proctrack,
        controller=CONTROLLER,
        ctld=CONTROLLER_PORT,
        slurmd=NODE_PORT,
        dbd=ACCOUNTING_PORT,
    )
    settings = _change(settings, layout.settings)
    lines = [f"ClusterName={layout.cluster}", f"SlurmctldHost={layout.login}({CONTROLLER})"]
    if any(host.shape.gpus for host in layout.hosts):
        lines += ["GresTypes=gpu", *(["AccountingStorageTRES=gres/gpu"] if layout.has_accounting else [])]
    lines += [node_line(host, layout.features) for host in layout.hosts]
    preemption = {partition.preemptible for partition in layout.partitions.values()} - {None}
    # A suspended job goes on when the other has ended: that is the gang scheduler's work.
    mode = "SUSPEND,GANG" if "suspend" in preemption else "REQUEUE"
    lines += ["PreemptType=preempt/partition_prio", f"PreemptMode={mode}"] if preemption else []
    default = next((n for n, p in layout.partitions.items() if p.default), next(iter(layout.partitions)))
    for name, partition in layout.partitions.items():
        line = partition_line(name, partition, hosts=layout.members[name], default=name == default)
        parts = [line + (_precedence(partition) if preemption else ""), layout.partition_settings.get(name, "")]
        lines.append(" ".join(filter(None, parts)))
    return settings + "\n".join(lines) + "\n"


def _change(settings: str, changes: Mapping[str, str]) -> str:
    """``settings`` with the lines of ``changes`` in place of their own; an empty value leaves the setting out."""
    unchanged = [line for line in settings.splitlines() if line.partition("=")[0] not in changes]
    return "\n".join([*unchanged, *(f"{name}={value}" for name, value in changes.items() if value)]) + "\n"


def cgroup_conf(layout: Layout, folder: Folder, *, version: tuple[int, int]) -> str | None:
    """cgroup.conf; ``None`` if the shape has the file, or this version of Slurm needs no setting."""
    if "cgroup.conf" in layout.files:
        return None
    if layout.proctrack == "cgroup":
        return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder.cgroups}\n"
    return "CgroupPlugin=disabled\n" if version >= CGROUPS_ARE_ASKED_FOR else None


def _megabytes(shape: NodeShape) -> int:
    return (shape.mem_bytes or 1 << 30) >> 20


def _limit_megabytes(memory: str | int | None) -> int | None:
    return None if memory is None else memory_bytes(str(memory)) >> 20


def node_line(host: Host, features: tuple[str, ...]) -> str:
    """A node of slurm.conf, as its shape claims it."""
    shape = host.shape
    parts = [
        f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name}",
        f"Sockets=1 CoresPerSocket={shape.cpus} ThreadsPerCore=1",
        f"RealMemory={_megabytes(shape)} TmpDisk=20480 State=UNKNOWN",
    ]
    if shape.gpus:
        parts.append("Gres=" + ",".join(f"gpu:{text}" for text in _gpus_by_type(shape)))
    if own := dict.fromkeys((*(shape.features or ()), *features)):
        parts.append("Feature=" + ",".join(own))
    return " ".join(parts)


def _gpus_by_type(shape: NodeShape) -> tuple[str, ...]:
    """``TYPE:COUNT`` of each type of GPU, ``COUNT`` where they have none."""
    return shape.gpu_models or ((f"{shape.gpu_model}:" if shape.gpu_model else "") + str(shape.gpus),)


def partition_line(name: str, partition: Partition, *, hosts: tuple[str, ...], default: bool) -> str:
    """A partition of slurm.conf over ``hosts``."""
    parts = [f"PartitionName={name} Nodes={','.join(hosts)} State=UP Default={'YES' if default else 'NO'}"]
    parts.append(f"MaxTime={partition.max_time or 'UNLIMITED'}")
    limits = {
        "MinNodes": partition.min_nodes,
        "MaxNodes": partition.max_nodes,
        "MaxCPUsPerNode": partition.max_cpus_per_node,
        "MaxMemPerNode": _limit_megabytes(partition.max_mem_per_node),
        "MaxMemPerCPU": _limit_megabytes(partition.max_mem_per_cpu),
        "AllowQos": ",".join(partition.qos) if partition.qos else None,
        "AllowAccounts": ",".join(partition.accounts) if partition.accounts else None,
    }
    parts += [f"{name}={value}" for name, value in limits.items() if value is not None]
    # A job without a memory request gets its CPUs' share; otherwise the first one would take the whole node.
    share = min(_megabytes(group) // group.cpus for group in partition.groups)
    parts.append(f"DefMemPerCPU={max(1, share)}")
    return " ".join(parts)


def _precedence(partition: Partition) -> str:
    """Who makes room for whom, where one of the partitions may be preempted."""
    parts = f" PriorityTier={1 if partition.preemptible else 2} PreemptMode={(partition.preemptible or 'off').upper()}"
    return parts if partition.grace is None else f"{parts} GraceTime={walltime_s(partition.grace)}"


def gres_conf(layout: Layout, folder: Folder) -> str:
    """gres.conf: each host's GPUs are the same device files, without real GPUs."""
    lines = []
    for host in layout.hosts:
        first = 0
        for text in _gpus_by_type(host.shape) if host.shape.gpus else ():
            count, model = gpus_and_model(text)
            kind = f" Type={model}" if model else ""
            which = f"[{first}-{first + count - 1}]" if count > 1 else str(first)
            lines.append(f"NodeName={host.name} Name=gpu{kind} File={folder.devices}/gpu{which}")
            first += count
    return "\n".join(lines) + "\n"


def slurmdbd_conf(layout: Layout, folder: Folder, *, password: str) -> str:
    """slurmdbd.conf; holds the database's password, so 0600."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={folder.munge_socket}
DbdHost={layout.login}
DbdAddr={CONTROLLER}
DbdPort={ACCOUNTING_PORT}
SlurmUser=root
PidFile={folder.root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def database_init(password: str) -> str:
    """MariaDB's initial statements: a database and one user, who connects by TCP from this machine."""
    return f"""\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
"""
