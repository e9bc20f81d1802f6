"""Slurm on this machine: its packages, the text of its configuration, its daemons, its accounting.

Each daemon is started and awaited until it answers.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

import hpcjobs
from hpcjobs import slurm_commands
from hpcjobs.errors import RequestError
from hpcjobs.processes.programs import Result, run
from hpcjobs.sandbox.folder import Daemon, Folder, alive, must, program, recorded_daemons, spawn, until, write
from hpcjobs.sandbox.layout import Host, Layout
from hpcjobs.sandbox.network import CONTROLLER, enter, listening
from hpcjobs.site.models import NodeShape, Partition
from hpcjobs.site.resources import gpus_and_model
from hpcjobs.slurm_commands import list_mpi_types
from hpcjobs.units import memory_bytes, time_limit, time_limit_s, walltime_s

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


PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin",
    "munge", "mariadb-server", "libpmix2", "libpmix-dev", "iproute2",
)  # fmt: skip


def check(*, install: bool, say: Callable[[str], None]) -> None:
    """Refuse a machine that cannot run a sandbox; ``install``: install missing packages.

    Raises RequestError: not root, not Debian or Ubuntu, or packages are missing: names the command. HpcJobsError:
    apt-get failed.
    """
    if not is_debian():
        raise RequestError(
            "a sandbox needs Debian or Ubuntu (its packages come by apt)",
            hint="use a container or virtual machine with Debian 12, or --site local, which needs no Slurm",
        )
    missing = missing_packages()
    if missing and not install:
        raise RequestError(f"packages are missing: {', '.join(missing)}", hint=f"{apt_line(missing)} (or --install)")
    if os.geteuid() != 0:
        raise RequestError(
            "a sandbox makes network namespaces and mounts, which only root may",
            hint="sudo hpcjobs sandbox up, or --site local, which needs neither root nor Slurm",
        )
    if missing:
        say(apt_line(missing))
        must(["apt-get", "update"])
        must(["env", "DEBIAN_FRONTEND=noninteractive", *apt_line(missing).split()])


def is_debian() -> bool:
    """Whether this machine runs Debian or a derivative, by /etc/os-release."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return False
    arguments = " ".join(line.partition("=")[2].strip('"') for line in lines if line.startswith(("ID=", "ID_LIKE=")))
    return not {"debian", "ubuntu"}.isdisjoint(arguments.split())


def missing_packages() -> list[str]:
    """Those of ``PACKAGES`` that dpkg does not have installed (or that a later release renamed)."""
    done = run(["dpkg-query", "--show", "--showformat=${Package} ${Provides} ${db:Status-Status}\n"])
    installed = [line for line in done.out.splitlines() if line.endswith(" installed")]
    have = {name.strip(",") for line in installed for name in line.split()}
    return [name for name in PACKAGES if name not in have]


def apt_line(packages: list[str]) -> str:
    """The command that installs ``packages``."""
    return "apt-get install -y --no-install-recommends " + " ".join(packages)


PACKAGE = "environment-modules"
SEARCHED = Path("/etc/environment-modules/modules")
"""The folder of the package for modulefiles of the machine's own; a host has the sandbox's there."""
_EMPTY = "#%Module1.0\n"


def available() -> bool:
    """Whether this machine has Environment Modules of Debian's package."""
    return SEARCHED.is_dir() and Path("/usr/share/modules/init/bash").is_file()


def reason_for_none() -> str:
    """Why a module of the site is not there."""
    if available():
        return "only modules that are named by name, or name and version, are rehearsed"
    return f"this machine has no Environment Modules ({apt_line([PACKAGE])})"


def write_modulefiles(folder: Folder, names: Collection[str]) -> None:
    """Make a modulefile without content for each module.

    Of ``gcc`` and ``gcc/12`` only the second becomes a file: loading ``gcc`` finds it.
    """
    folder.modulefiles.mkdir()
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    for name in set(names) - folders:
        path = folder.modulefiles / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, _EMPTY)


_DATABASE = (
    "--no-defaults",
    "--user=mysql",
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--performance-schema=OFF",
    "--max-connections=64",
    "--innodb-buffer-pool-size=256M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-log-file-size=64M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
    # slurmdbd does not start with it on; "loose": a MariaDB that does not know it goes on.
    "--loose-innodb-snapshot-isolation=OFF",
)
# Runs in a new mount namespace. $1: the host's private folders; $2: its modulefiles; $3: the folder where `module`
# looks for them (empty: nowhere); the others, up to "--": folders of this machine that stay visible below the private
# ones. ``exec`` keeps the pid.
_NODE_SCRIPT = """\
set -e; home=$1; modulefiles=$2; searched=$3; shift 3
[ -z "$searched" ] || mount -o bind,ro "$modulefiles" "$searched"
while [ "$1" != -- ]; do mkdir -p "$home$1"; mount -o bind,ro "$1" "$home$1"; shift; done
shift
mount --rbind "$home/tmp" /tmp; mount --rbind "$home/var/tmp" /var/tmp
mount -t tmpfs -o mode=1777 hpcjobs-shm /dev/shm
exec "$@"
"""
_ORDER = ("munged", "mariadbd", "slurmdbd", "slurmctld")
"""Who needs whom; the slurmds come last."""


def slurm_version() -> tuple[int, int]:
    """Major and minor of the Slurm that this machine has: (22, 5), (24, 11)."""
    major, minor = re.findall(r"\d+", must(["slurmctld", "-V"]))[:2]
    return int(major), int(minor)


def mpi_types(folder: Folder) -> frozenset[str]:
    """Types of ``srun --mpi=list``. Some packages of Slurm come without PMIx."""
    conf = folder.root / "mpi.conf"
    write(conf, "ClusterName=mpi\nSlurmctldHost=localhost\n")  # srun prints an error without one
    srun, *options = list_mpi_types()
    done = run(["env", f"SLURM_CONF={conf}", program(srun), *options])
    conf.unlink()
    return frozenset(re.findall(r"^(?:srun: )?\s*(\w+)\s*$", f"{done.out}\n{done.err}", re.MULTILINE))


def start_munge(folder: Folder) -> Daemon:
    """Start a munged with a new key; the machine's own munged is not touched."""
    home = folder.munge
    home.mkdir()
    _give(home, user="munge")
    write(home / "munge.key", secrets.token_hex(64), mode=0o600)
    _give(home / "munge.key", user="munge")
    argv = [program("setpriv"), "--reuid=munge", "--regid=munge", "--init-groups", program("munged")]
    argv += ["--foreground", f"--socket={folder.munge_socket}", f"--key-file={home}/munge.key"]
    argv += [f"--pid-file={home}/munged.pid", f"--log-file={home}/munged.log"]
    argv += [f"--seed-file={home}/munged.seed", "--num-threads=4"]
    return _start(folder, "munged", [*enter(folder), *argv])


def start_database(folder: Folder, password: str) -> Daemon:
    """A MariaDB of our own: own data, own socket, own port. In memory: its syncs are half of a slow start."""
    data = folder.database
    data.mkdir()
    must(["mount", "-t", "tmpfs", "-o", "mode=0700,size=4G", "hpcjobs-db", str(data)])
    _give(data, user="mysql")
    install = [
        *enter(folder),
        program("mariadb-install-db"),
        "--no-defaults",
        "--user=mysql",
        f"--datadir={data}",
        "--skip-test-db",
    ]
    must([*install, "--innodb-log-file-size=64M", "--innodb-flush-log-at-trx-commit=0"])
    write(data / "init.sql", database_init(password), mode=0o600)
    _give(data / "init.sql", user="mysql")
    argv = [program("mariadbd"), *_DATABASE, f"--datadir={data}", f"--socket={data}/mariadb.socket"]
    argv += [f"--pid-file={data}/mariadbd.pid", f"--port={DATABASE_PORT}", f"--init-file={data}/init.sql"]
    return _start(folder, "mariadbd", [*enter(folder), *argv])


def start_accounting(folder: Folder) -> Daemon:
    """Start slurmdbd, which reads its file in the folder of slurm.conf."""
    return _start(folder, "slurmdbd", [*enter(folder), program("slurmdbd"), "-D"])


def start_controller(folder: Folder) -> Daemon:
    """slurmctld, under the login host's name."""
    argv = [program("slurmctld"), "-D", "-f", str(folder.slurm_conf)]
    return _start(folder, "slurmctld", [*enter(folder), *argv])


def start_node(folder: Folder, host: Host) -> Daemon:
    """slurmd of one host; it registers with the controller when it is ready."""
    home = folder.node(host.name)
    for name, mode in (("spool", 0o755), ("tmp", 0o1777), ("var/tmp", 0o1777)):
        (home / name).mkdir(parents=True)
        (home / name).chmod(mode)
    argv = [program("unshare"), "--mount", "--propagation", "private", program("sh"), "-c", _NODE_SCRIPT, "sh"]
    argv += [str(home), str(folder.modulefiles), str(SEARCHED) if available() else ""]
    argv += [*_needed_from_private_folders(), "--"]
    argv += [program("slurmd"), "-D", "-N", host.name, "-f", str(folder.slurm_conf)]
    return _start(folder, f"slurmd-{host.name}", [*enter(folder, host), *argv])


def _needed_from_private_folders() -> list[str]:
    """Folders of Python and hpcjobs that a host's private /tmp or /var/tmp would hide: jobs need them."""
    here = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, Path(hpcjobs.__file__).parents[1])}
    private = [Path("/tmp"), Path("/var/tmp")]
    return sorted(str(path) for path in here if any(parent in private for parent in path.parents))


def restart_dead(folder: Folder) -> list[Daemon]:
    """Start every recorded daemon that died, with its earlier command; returns these.

    Slurm resumes its jobs from its saved state; a slurmd finds the job steps that outlived it.
    """
    dead = [daemon for daemon in recorded_daemons(folder) if not alive(daemon)]
    dead.sort(key=lambda daemon: _ORDER.index(daemon.name) if daemon.name in _ORDER else len(_ORDER))
    return [_start(folder, daemon.name, daemon.argv) for daemon in dead]


def _start(folder: Folder, name: str, argv: Sequence[str]) -> Daemon:
    daemon = spawn(folder, name, argv)
    until(_answers(folder, name), what=f"an answer from {name}", watch=[daemon])
    return daemon


def _answers(folder: Folder, name: str) -> Callable[[], bool]:
    """Whether the daemon does its work. A slurmd is known by its node's state, so it is not asked here."""
    socket = folder.munge_socket
    probe = ["munge", "--no-input", f"--socket={socket}"]
    return {
        "munged": lambda: socket.exists() and run([program(probe[0]), *probe[1:]]).code == 0,
        "mariadbd": lambda: listening("127.0.0.1", DATABASE_PORT),
        "slurmdbd": lambda: listening(CONTROLLER, ACCOUNTING_PORT),
        "slurmctld": lambda: listening(CONTROLLER, CONTROLLER_PORT),
    }.get(name, lambda: True)


def _give(path: Path, *, user: str) -> None:
    owner = pwd.getpwnam(user)
    os.chown(path, owner.pw_uid, owner.pw_gid)


_PEOPLE = range(1000, 60_000)
"""User ids of people, without Debian's system users."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)


def _with_slurm_conf(folder: Folder, argv: Sequence[str]) -> list[str]:
    return ["env", f"SLURM_CONF={folder.slurm_conf}", program(argv[0]), *argv[1:]]


def slurm(folder: Folder, argv: Sequence[str]) -> Result:
    """Run a Slurm command against this sandbox, whatever SLURM_CONF says."""
    return run(_with_slurm_conf(folder, argv))


def node_states(folder: Folder) -> dict[str, str]:
    """Host -> state in sinfo's spelling; empty when the controller does not answer."""
    done = slurm(folder, slurm_commands.list_node_states())
    return dict(line.split() for line in done.out.splitlines()) if done.code == 0 else {}


def fill_accounting(folder: Folder, layout: Layout) -> None:
    """Cluster, QOS with their limits, accounts, and the users who may submit: everybody whom this machine knows."""
    _manage(folder, "add", "cluster", layout.cluster)
    if others := [name for name in layout.qos if name != "normal"]:
        _manage(folder, "add", "qos", ",".join(others))
    for name, limit in layout.qos.items():
        if time_limit_s(limit or None) is not None:
            wall = f"MaxWall={time_limit(limit)}"
            # DenyOnLimit: too long a job is refused when it is submitted, instead of pending for ever.
            _manage(folder, "modify", "qos", name, "set", wall, "Flags=DenyOnLimit")
    accounts = ",".join(layout.accounts)
    _manage(folder, "add", "account", accounts, *_account_options(layout))
    add_users(folder, layout, users_of_the_machine())


def users_of_the_machine() -> list[str]:
    """Root, who called sudo, and the people in the machine's list of users (a directory service may not list all)."""
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid in _PEOPLE and _NAME.match(entry.pw_name)]
    return list(dict.fromkeys(["root", os.environ.get("SUDO_USER") or "root", *people]))


def add_users(folder: Folder, layout: Layout, users: Sequence[str]) -> None:
    """Let these users submit under every account of the sandbox; users with access stay unchanged."""
    # Of an account of the sandbox: slurmdbd itself makes a user root, who has the account root alone.
    of_an_account = slurm_commands.list_associations(["User"], account=layout.accounts[0])
    allowed = must(_with_slurm_conf(folder, of_an_account)).split()
    if not (others := [user for user in users if user not in allowed]):
        return  # sacctmgr would call it an error
    options = _account_options(layout)
    accounts = f"account={','.join(layout.accounts)}"
    _manage(folder, "add", "user", ",".join(others), accounts, f"defaultaccount={layout.accounts[0]}", *options)


def _account_options(layout: Layout) -> tuple[str, ...]:
    return (f"cluster={layout.cluster}", f"qos={','.join(layout.qos)}", "defaultqos=normal")


def _manage(folder: Folder, *arguments: str) -> None:
    must(_with_slurm_conf(folder, slurm_commands.change_accounting(*arguments)))
