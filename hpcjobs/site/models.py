"""Keys of a site file."""

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hpcjobs.errors import nearest
from hpcjobs.scheduler_kind import KINDS, SchedulerKind, find_kind
from hpcjobs.site.checks import Frozen as Frozen
from hpcjobs.site.checks import (
    check_amount,
    check_count,
    check_duration,
    check_line,
    check_slurm_name,
    check_time_limit,
)
from hpcjobs.site.checks import check_name as check_name
from hpcjobs.site.figures import Figure, check_figures
from hpcjobs.site.partition import NodeGroup as NodeGroup
from hpcjobs.site.partition import NodeShape as NodeShape
from hpcjobs.site.partition import Partition as Partition
from hpcjobs.site.resources import Resources as Resources
from hpcjobs.site.resources import check_fields
from hpcjobs.units import time_limit

if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(KINDS)]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex", "none"]
BindTo = Literal["none", "core", "l3cache", "numa", "socket"]


class Affinity(Frozen, frozen=True):
    """Binding of ranks to cores and GPUs; ``None``: chosen by the job (docs/gpu.md).

    Values are srun's; ``default`` leaves the binding to the cluster.
    """

    cpu_bind: str | None = None
    """``srun --cpu-bind``; default: ``cores`` for jobs with GPUs, otherwise the cluster's default."""
    distribution: str | None = None
    """``srun --distribution``, unless the job names one; with GPUs ``block:block``: GPUs are numbered by socket too."""
    gpu_bind: str | None = None
    """``srun --gpu-bind`` (``closest``, ``none``, ``map_gpu:3,2,1,0``); default: the cluster's."""
    numa_binding: NumaBinding | None = None
    """``torchrun --numa-binding``, where the node's torch and numactl have it; with several GPUs of a node that the job
    has for itself ``node``, otherwise ``none``."""
    mpirun_bind_to: BindTo | None = None
    """``mpirun --bind-to``; default ``none``: on a shared node Open MPI would bind every job to the same cores."""

    def __post_init__(self) -> None:
        for field in ("cpu_bind", "distribution", "gpu_bind"):
            if (value := getattr(self, field)) is not None:
                check_line(value, f"affinity.{field}")


UNLIMITED = 10**9
WARNING_S = 300
"""Seconds ahead of the time limit, until the program has measured a better value (a quarter of a shorter limit)."""
_UNLIMITED_NAMES = ("∞", "inf", "unlimited")


class Retries(Frozen, frozen=True):
    """Budgets, counted over all attempts of a job."""

    timeout: int = UNLIMITED
    """It was saved ahead of its time limit."""
    preempt: int = UNLIMITED
    """It had to make room, or somebody signalled it."""
    node: int = 3
    """After a failed node, a killed or lost rank, or a halt of all ranks."""
    error: int = 0
    """The program failed."""

    def __str__(self) -> str:
        counts = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ",".join(f"{name}={'∞' if count == UNLIMITED else count}" for name, count in counts)


def parse_retries(text: str) -> Retries | None:
    """Parse ``off`` (none), ``on`` (the defaults), or ``node=5,error=1`` (changes of the defaults).

    Raises ValueError: neither of these.
    """
    if text in ("on", "off"):
        return Retries() if text == "on" else None
    counts = {}
    for pair in text.split(","):
        name, _, count = (part.strip() for part in pair.partition("="))
        if name not in Retries.__struct_fields__:
            raise ValueError(
                f"retries {text!r}: {name!r} is neither on, off nor a cause;"
                f" {nearest(name, Retries.__struct_fields__)}; use on, off, or counts such as timeout=∞,node=3"
            )
        if count not in _UNLIMITED_NAMES and not (count.isascii() and count.isdigit() and int(count) < UNLIMITED):
            raise ValueError(f"retries {text!r}: {name}={count!r} is neither a number nor ∞ (inf)")
        counts[name] = UNLIMITED if count in _UNLIMITED_NAMES else int(count)
    return Retries(**counts)


Runtime = Literal["apptainer", "singularity", "pyxis", "none"]

_REFUSED = ("--writable", "-w")
"""Whether images are writable. They are shared: one job's changes reach all others."""


class Containers(Frozen, frozen=True):
    """How a job's program runs inside an image here."""

    runtime: Runtime = "none"
    """Program that runs images on the nodes."""
    program: str | None = None
    """The runtime's program, where it is not in the PATH of the nodes."""
    images: dict[str, str] = {}
    """Name -> file. With pyxis also a name that enroot imports (``nvcr.io#nvidia/pytorch:24.12-py3``)."""
    folder: str = "~/.cache/hpcjobs/images"
    """Where ``container build`` puts ``NAME.sif``; an image in it is known by its name."""
    build_folder: str | None = None
    """Folder for builds of images: some gigabytes; ``None``: the system's temporary folder."""
    default: str | None = None
    """The image of jobs that name none; ``--container none`` runs such a job without."""
    binds: tuple[str, ...] = ()
    """``SOURCE``, ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``: data, shared software. Folders of run and code are bound
    anyway."""
    gpu: Literal["nv", "rocm", "none"] | None = None
    """How GPUs get in; ``None``: ``nv`` where the job asks for GPUs."""
    clean_env: bool = False
    """Pass only variables of the job, its launcher and the scheduler."""
    home: bool = False
    """Let the user's home folder in."""
    python: str = "python3"
    """Python in the images."""
    stage: str = "/tmp"
    """Folder local to each node, for the copy that ``--stage-image`` makes."""
    args: tuple[str, ...] = ()
    """Further options of the runtime's ``exec``; with pyxis of ``srun``."""

    def __post_init__(self) -> None:
        for name in (*self.images, *filter(None, (self.default,))):
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) or name == "none":
                raise ValueError(f"images {name!r}: a name of letters, digits, '_', '.', '-', and not none")
        for bind in self.binds:
            check_bind(bind)
        for arg in self.args:
            if any(ord(char) < 32 for char in arg):
                raise ValueError(f"args {arg!r}: no option holds control characters")
            if arg in _REFUSED or arg.startswith("--writable="):
                raise ValueError(f"args {arg!r}: an image is shared and stays as it is; --writable-tmpfs is allowed")


def check_bind(bind: str) -> None:
    """Refuse a path that ``--bind`` cannot express (ValueError)."""
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if not source or mode not in ("", "ro", "rw") or "," in bind or any(ord(char) < 32 for char in bind):
        raise ValueError(f"binds {bind!r}: write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, without commas")
    if target and not target.startswith("/"):
        raise ValueError(f"binds {bind!r}: {target!r} must be an absolute path in the image")


class Jupyter(Frozen, frozen=True):
    """Sessions on this site (``hpcjobs jupyter``)."""

    REMOVED = dict.fromkeys(
        ("bind", "tls"),
        "delete it: a session listens at a socket that only you can open, and no longer at a port of the node "
        "(docs/jupyter.md, How to connect)",
    )
    """Keys of earlier versions, and their replacements."""
    ssh_to_nodes: bool = False
    """Users may ssh to a node that runs their job, and see the job's /tmp there; otherwise a step of the job carries
    the connection."""
    python: str | None = None
    """Python that has Jupyter, on the node; ``None``: the site's."""
    kernels: dict[str, str] = {}
    """Name -> Python on the node (``$VARIABLES`` and ``~`` are expanded there), or ``conda:NAME``: environments to
    choose from."""
    idle: str | None = "2h"
    """A session ends after this time without any user or kernel activity; null: never."""
    hpcjobs: str = "hpcjobs"
    """Shell command of a laptop on the login node (``--connect``)."""

    def __post_init__(self) -> None:
        check_duration(self.idle, "idle")


_HIGHEST_PORT = 65535


class Login(Frozen, frozen=True):
    """The login host, for the same commands from a laptop; its name alone, `user@host`, will do for most."""

    host: str
    """A host name, or the name of a `Host` in ~/.ssh/config."""
    user: str | None = None
    """``None``: from ~/.ssh/config, or the user's name on the laptop."""
    port: int | None = None
    """``None``: from ~/.ssh/config, or 22."""
    command: str | None = None
    """How hpcjobs is called there, words of bash; ``None``: the laptop's own version, installed there once."""
    python: str | None = None
    """Python 3.10 or newer there, to install it with; ``None``: the newest one on PATH of a login shell."""
    code: str = "~/hpcjobs-code"
    """Folder there for copies of the laptop's code, which the nodes must see; ``$VARIABLES`` are expanded there."""

    def __post_init__(self) -> None:
        for field in ("host", "user", "command", "python", "code"):
            value = getattr(self, field)
            if value is not None:
                check_line(value, f"login.{field}")
        for field in ("host", "user"):
            value = getattr(self, field)
            if value is not None and (value.startswith("-") or re.search(r"\s", value)):
                raise ValueError(f"login.{field} {value!r}: no name begins with '-' or has a space")
        if self.port is not None and not 0 < self.port <= _HIGHEST_PORT:
            raise ValueError(f"login.port must be between 1 and {_HIGHEST_PORT}, not {self.port}")

    @property
    def destination(self) -> str:
        """The destination for ssh."""
        target = self.host if self.user is None else f"{self.user}@{self.host}"
        return target if self.port is None else f"ssh://{target}:{self.port}"


class Policy(Frozen, frozen=True):
    """Rules for every job of the cluster; only in the centre's files, and for all site files of the cluster."""

    partitions: tuple[str, ...] | None = None
    """Partitions that jobs may use; ``None``: all."""
    max_nodes: int | None = None
    """Nodes that one job may have."""
    max_gpus: int | None = None
    """GPUs that one job may have on all its nodes together."""
    max_time: str | None = None
    """Longest time limit of a job; a job without one is refused."""
    account_required: bool = False
    """Each job names an account."""
    accounts: tuple[str, ...] | None = None
    """Accounts that jobs may be charged to; ``None``: all."""
    mandatory: Resources = Resources()
    """Mandatory requests: added to a job without this request, refused with another value."""
    messages: tuple[str, ...] = ()
    """Lines that each submission prints."""

    def __post_init__(self) -> None:
        for field in ("max_nodes", "max_gpus"):
            if (count := getattr(self, field)) is not None:
                check_count(count, field, least=0 if field == "max_gpus" else 1)
        check_time_limit(self, "max_time")
        for field in ("partitions", "accounts", "messages"):
            for text in getattr(self, field) or ():
                check_line(text, field)


class AppliedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that holds for a site, and the centre's file that has it; manifests of earlier versions have more."""

    path: str
    policy: Policy


GpuRequest = Literal["gres", "gpus-per-node", "gpus-per-task", "none"]
MemoryRequest = Literal["mem", "mem-per-cpu", "none"]
LauncherName = Literal["srun", "torchrun", "spawn", "mpirun", "horovod-gloo", "horovodrun"]
_OPTION = re.compile(r"[a-z][a-z0-9-]*\Z", re.ASCII)


OF_THE_LOADER = ("name", "path", "rehearsal", "extended", "untrusted", "policies")
"""Fields of `Site` that no file has."""


class Environment(Frozen, frozen=True):
    """Source of Python on the node: at most one of conda and venv, after modules are loaded."""

    conda: str | None = None
    """Name or path of a conda environment."""
    conda_init: str | None = None
    """Script that defines ``conda`` (default: found through ``conda info --base``)."""
    venv: str | None = None
    """Folder of a virtual environment."""

    def __post_init__(self) -> None:
        if self.conda is not None and self.venv is not None:
            raise ValueError("use conda or venv, not both; null clears that of an extended file")


class Prices(Frozen, frozen=True):
    """Money per hour, in ``currency``; used by reports, never by submission."""

    cpu_hour: float | None = None
    """One CPU."""
    gpu_hour: float | None = None
    """One GPU."""
    node_hour: float | None = None
    """One node."""
    currency: str = "EUR"
    """Currency of the prices."""

    def __post_init__(self) -> None:
        for field in ("cpu_hour", "gpu_hour", "node_hour"):
            check_amount(getattr(self, field), field)
        check_line(self.currency, "currency")


class Watts(Frozen, frozen=True):
    """Electrical power in watts, for the modelled energy of reports."""

    cpu: float | None = None
    """Per allocated CPU."""
    gpu: float | None = None
    """Per allocated GPU."""
    node_idle: float | None = None
    """Power of an idle node."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            check_amount(getattr(self, field), field)


class Site(Frozen, frozen=True):
    """One cluster or machine. The file's stem is its name."""

    name: str = ""
    """Set by the loader from the file's stem."""
    path: str = ""
    """Set by the loader: the file it was read from."""
    rehearsal: bool = False
    """Set by the loader: a sandbox plays this site."""
    extended: tuple[str, ...] = ()
    """Set by the loader: the files that ``extends`` leads to, the nearest first."""
    untrusted: tuple[str, ...] = ()
    """Set by the loader: ``file:line: key`` of untrusted keys of a project's file that must not act."""
    policies: tuple[AppliedPolicy, ...] = ()
    """Set by the loader: the centre's policies that hold here."""
    extends: str | None = None
    """Name of the site file that this one changes, searched in the same folder and in the layers below (user, centre,
    examples, gallery).
    Mappings are merged key by key, at every depth; any other value, a list or null too, replaces the
    parent's."""
    slurm_conf: str | None = None
    """SLURM_CONF for every Slurm command, where the default is not the right one."""
    cluster: str | None = None
    """Slurm's ClusterName: where no site is named, the machine's own cluster chooses the site by it."""
    description: str = ""
    """One line for the list of sites."""
    scheduler: SchedulerName = "slurm"
    """``local``: this machine, without Slurm."""
    partitions: dict[str, Partition] = {}
    """Name -> partition; a slurm site needs at least one."""
    defaults: Resources = Resources()
    """Default requests of jobs."""
    qos: dict[str, str] = {}
    """QOS name -> longest time it allows (``""``: without a limit)."""
    default_qos: str | None = None
    """The QOS that a job gets which names none (the association's DefaultQOS); ``None``: not known."""
    launchers: tuple[LauncherName, ...] | None = None
    """Launchers that work here, the default one first; ``None``: all of the scheduler's."""

    gpu_request: GpuRequest = "gpus-per-node"
    """Option of sbatch that requests GPUs here; ``none``: jobs get no GPUs."""
    memory_request: MemoryRequest = "mem"
    """Option of sbatch that requests memory here; ``none``: never requested."""
    directives: dict[str, str | None] = {}
    """Slurm option -> null (never send it) or a replacement that contains ``{value}`` for the value."""
    sbatch: tuple[str, ...] = ()
    """Options of sbatch, sent unchanged: ``name=value`` or ``name``."""
    srun: tuple[str, ...] = ()
    """Options of the ``srun`` that starts the tasks, added unchanged."""

    required: tuple[str, ...] = ()
    """Options that each job names here (``account``, ``qos``, ``time``), whatever its partition."""
    licenses: dict[str, int] = {}
    """Licences that Slurm counts here, ``NAME: TOTAL``; with any, a job that asks for another one, or for more of it,
    is refused."""
    mail_domain: str | None = None
    """Slurm's mails go to ``USER@MAIL_DOMAIN``; to a ``mail_user`` that has no domain, at this one."""

    chooses_partition: bool = False
    """A plugin of the cluster (job_submit) chooses the partition of jobs that name none: no default is named for
    them, and a job fits if one of the partitions takes it. It may choose the QOS too: the default one refuses none."""
    max_submit_jobs: int | None = None
    """Jobs you may have in the queue (MaxSubmitJobs of account or QOS), array tasks counted one by one; a sweep
    submits the rest later."""

    mpi: str | None = None
    """``srun --mpi`` type; ``None``: the cluster's default."""
    interface: str | None = None
    """Network interface of the fast network, for gloo and NCCL."""
    address_suffix: str = ""
    """Appended to a host name to reach it over the fast network (``-ib``)."""
    affinity: Affinity = Affinity()
    """Binding of the ranks of jobs to cores and GPUs."""

    module_init: str | None = None
    """Script that defines ``module`` on the nodes; ``None``: the usual places are tried."""
    modules: tuple[str, ...] = ()
    """Modules that each job loads, in this order."""
    env: dict[str, str] = {}
    """Environment variables of each job; NAME: value."""
    setup: tuple[str, ...] = ()
    """Shell lines run by the batch script after modules and environment, before ``env`` is set."""
    environment: Environment = Environment()
    """The conda environment or venv of jobs."""
    python: str | None = None
    """Python on the node; ``None``: the Python of hpcjobs, or ``python`` of the environment."""
    node_python: str | None = None
    """Python 3.6 or newer on the nodes, without modules, for jobs with retries; ``None``: ``python`` or the
    environment's if it is an absolute path, otherwise /usr/bin/python3."""
    containers: Containers = Containers()
    """How programs run in images."""
    jupyter: Jupyter = Jupyter()
    """Sessions of ``hpcjobs jupyter``."""

    run_root: str = "runs"
    """Parent of run folders; ``$VARIABLES`` and ``~`` are expanded at submission."""
    scratch: str | None = None
    """Node-local scratch, expanded on the node."""
    node_local: tuple[str, ...] = ()
    """Folders that are local to each node; no run folder may be inside one."""
    login: str | Login | None = None
    """The host that laptops reach by ssh: ``user@host``, or a section; commands of a laptop run there."""
    retries: str | None = None
    """How often jobs are started again here unless they say otherwise (``on``, ``node=5,error=1``)."""
    signal_before: str | None = None
    """Time between the signal to save and the job's time limit (``5m``); ``None``: from the trainer's measurements."""
    figures: dict[str, Figure | str | None] = {}
    """Figures of merit in the logs of jobs here, by name; a text has the syntax of ``--metric``."""
    prices: Prices = Prices()
    """Prices per hour, for reports."""
    watts: Watts = Watts()
    """Power, for the modelled energy of reports."""
    policy: Policy | None = None
    """Rules for jobs of every site file of this cluster; only in the centre's files."""
    cloud: dict[str, Any] | None = None
    """Location and type of the rented cluster: only `hpcjobs.cloud` reads it, so submissions load no types of it."""

    def __post_init__(self) -> None:
        if sum(p.default for p in self.partitions.values()) > 1:
            raise ValueError("only one partition can have default: true")
        for name in self.partitions:
            check_slurm_name(name, "partition")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"env {name!r} is no name of an environment variable")
        if self.launchers is not None and not self.launchers:
            raise ValueError("launchers: at least one is needed; leave the key out for all")
        self._check_qos()
        check_fields(self.required, "required")
        for name, count in self.licenses.items():
            check_line(name, "licenses")
            check_count(count, f"licenses.{name}", least=0)
        if self.mail_domain is not None:
            check_name(self.mail_domain, "mail_domain")
        self._check_directives()
        self._check_lines()
        check_duration(self.signal_before, "signal_before")
        if self.retries is not None:
            parse_retries(self.retries)
        if self.max_submit_jobs is not None:
            check_count(self.max_submit_jobs, "max_submit_jobs")
        check_figures(self.figures)

    def _check_qos(self) -> None:
        for name, limit in self.qos.items():
            check_slurm_name(name, "qos")
            if limit:
                try:
                    time_limit(limit)
                except ValueError as error:
                    raise ValueError(f"qos.{name}: {error}") from error
        if self.qos and self.default_qos is not None and self.default_qos not in self.known_qos:
            known = nearest(self.default_qos, self.known_qos)
            raise ValueError(f"default_qos: {self.default_qos!r} is not one of qos; {known}")

    def _check_directives(self) -> None:
        for name, template in self.directives.items():
            if template is None:
                continue
            check_line(template, f"directives.{name}:")
            if set("{}") & set(template.replace("{value}", "")):
                raise ValueError(f"directives.{name}: {template!r}: only {{value}} can stand in braces")
            _check_option(template, f"directives.{name}:")
        for field in ("sbatch", "srun"):
            for option in getattr(self, field):
                check_line(option, f"{field}:")
        for option in self.sbatch:
            _check_option(option, "sbatch:")

    def _check_lines(self) -> None:
        """Each of these becomes part of one line of a script."""
        for field in ("mpi", "interface", "address_suffix", "module_init", "python", "run_root", "scratch"):
            if value := getattr(self, field):
                check_line(value, field)
        if isinstance(self.login, str):
            Login(host=self.login)
        for field in ("modules", "node_local"):
            for value in getattr(self, field):
                check_line(value, field)

    @property
    def kind(self) -> SchedulerKind:
        """The capabilities of its scheduler."""
        return find_kind(self.scheduler)

    @property
    def login_host(self) -> Login | None:
        """``login`` as a section, however it is written."""
        return Login(host=self.login) if isinstance(self.login, str) else self.login

    @property
    def known_qos(self) -> frozenset[str]:
        """Every QOS that the file names."""
        return frozenset(self.qos).union(*(partition.qos or () for partition in self.partitions.values()))

    @property
    def default_partition(self) -> str | None:
        """The partition marked ``default: true``, or the first one."""
        marked = [name for name, partition in self.partitions.items() if partition.default]
        return next(iter(marked or self.partitions), None)


def _check_option(text: str, what: str) -> None:
    """Refuse a ``text`` that does not begin with the name of one option: a further option would hide behind it."""
    name = text.removeprefix("--").partition("=")[0]
    if not _OPTION.match(name):
        raise ValueError(f"{what} {text!r}: expected NAME=VALUE or NAME, with one long option of sbatch")
