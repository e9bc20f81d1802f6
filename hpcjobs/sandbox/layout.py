"""Computes the cluster to build from a shape and a site; the site may be read from another cluster's slurm.conf.

Pure: the machine is not examined.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from hpcjobs.errors import ConfigError, RequestError, reason_of
from hpcjobs.site.checks import check_slurm_name, is_name
from hpcjobs.site.models import Containers, NodeGroup, NodeShape, Partition, Resources, Site
from hpcjobs.site.partition import count_gpus
from hpcjobs.site.resources import node_range
from hpcjobs.slurm_commands import hosts_of
from hpcjobs.units import format_megabytes

PROCTRACK = ("linuxproc", "cgroup")
"""Slurm's ProctrackType. ``cgroup``, as on most clusters, signals only processes that slurmstepd started."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``sandbox up``; ``None`` means "not given"."""

    like: str | None = None
    """The site to copy: its name, the path of its file, or the path of a cluster's slurm.conf (``*.conf``)."""
    nodes: int | None = None
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    proctrack: str | None = None
    """How slurmd knows a job's processes: one of `PROCTRACK`, by default the first."""
    settings: dict[str, str] = {}
    """Settings of slurm.conf as another site has them, by name; an empty text leaves one out. From Python only."""
    partition_settings: dict[str, str] = {}
    """Partition -> additional settings of its line in slurm.conf (``Hidden=YES``). From Python only."""
    files: dict[str, str] = {}
    """Further files in the folder of slurm.conf (``job_submit.lua``), name -> text. From Python only."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the cluster."""

    name: str
    address: str
    shape: NodeShape


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster to build, resolved from a shape and a site."""

    site: str
    cluster: str
    """Slurm's ClusterName: lower-case letters, digits and underscores."""
    login: str
    """Host name of the controller."""
    hosts: tuple[Host, ...]
    partitions: dict[str, Partition]
    """With the node counts of the sandbox."""
    members: dict[str, tuple[str, ...]]
    """Partition -> names of its hosts."""
    qos: dict[str, str]
    """QOS -> longest time (``""``: the QOS sets no limit)."""
    accounts: tuple[str, ...]
    """The first one is the users' default."""
    features: tuple[str, ...]
    mpi: str
    modules: tuple[str, ...] = ()
    """The site's modules on its hosts: modulefiles without any effect."""
    proctrack: str
    settings: dict[str, str] = {}
    partition_settings: dict[str, str] = {}
    files: dict[str, str] = {}
    overlay: dict[str, Any]
    """Site fields that differ from the real site's, as ``Rehearsal.overlay`` wants them."""

    @property
    def has_accounting(self) -> bool:
        """Whether slurmdbd and its database are part of the cluster."""
        return self.settings.get("AccountingStorageType", "slurmdbd").endswith("slurmdbd")


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that is up."""

    root: str
    site: str
    slurm_conf: str
    shape: Shape
    hosts: tuple[Host, ...]
    partitions: dict[str, tuple[str, ...]]
    """Partition -> names of its hosts."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``up``: everything runs. ``damaged``: ``problems`` lists dead daemons and remains. ``down``: no remains."""

    state: Literal["up", "damaged", "down"]
    root: str
    sandbox: Sandbox | None = None
    problems: tuple[str, ...] = ()
    nodes: dict[str, str] = {}
    """Host -> state in sinfo's spelling (``idle``, ``mixed``, ``down*``)."""


DEFAULT_NODES = 4
MAX_NODES = 64
"""Each node is a slurmd on this machine, in separate namespaces."""
MAX_CPUS, MAX_GPUS = 1024, 64
MPI_TYPES = ("pmix", "pmi2", "none")
ACCOUNT = "sandbox"


def resolve_layout(
    shape: Shape, site: Site, *, mpi_types: Collection[str] = MPI_TYPES, has_modules: bool = False
) -> Layout:
    """The cluster for ``shape``: a copy of ``site`` with --like, otherwise ``site`` in another shape.

    ``mpi_types``: types of this machine's srun. The site's type is preferred, then the order of `MPI_TYPES`.
    ``has_modules``: this machine has Environment Modules, so that jobs load the site's modules.

    Raises RequestError: the shape does not fit the site, or the site has no Slurm.
    """
    _check(shape, site)
    partitions = site.partitions if shape.like is not None else _reshape(shape, site)
    counts = _hosts_per_shape(partitions, requested=shape.nodes)
    hosts = _hosts(_prefix(site.name), counts)
    members = {name: _members(partition, hosts) for name, partition in partitions.items()}
    scaled = {name: _scale(partition, counts) for name, partition in partitions.items()}
    mpi = next((kind for kind in (site.mpi, *MPI_TYPES) if kind in MPI_TYPES and kind in mpi_types), "none")
    modules = loadable_modules(site) if has_modules else ()
    return Layout(
        site=site.name,
        cluster=re.sub(r"[^a-z0-9_]", "_", site.name.lower()),
        login=f"{_prefix(site.name)}-login",
        hosts=hosts,
        partitions=scaled,
        members=members,
        qos=_qos(site),
        accounts=(ACCOUNT, *sorted(_accounts(site) - {ACCOUNT})),
        features=_features(site),
        mpi=mpi,
        modules=modules,
        proctrack=shape.proctrack or PROCTRACK[0],
        settings=_licenses(site) | shape.settings,
        partition_settings=shape.partition_settings,
        files=shape.files,
        overlay=_overlay(scaled, site=site, mpi=mpi, modules=modules),
    )


def _check(shape: Shape, site: Site) -> None:
    if not site.kind.has_nodes:
        raise RequestError(
            f"site {site.name} has no Slurm, there is nothing to rehearse",
            hint=f"hpcjobs submit --site {shlex.quote(site.name)} runs on this machine as it is",
        )
    if shape.like is not None and (shape.cpus_per_node is not None or shape.gpus_per_node is not None):
        raise RequestError(
            f"--like {shape.like} takes the CPUs and GPUs of a node from the site",
            hint="leave --cpus-per-node and --gpus-per-node out, or --like",
        )
    if shape.proctrack not in (None, *PROCTRACK):
        raise RequestError(f"--proctrack {shape.proctrack}: a sandbox has {' or '.join(PROCTRACK)}")
    for name, value, least, most in (
        ("--nodes", shape.nodes, 1, MAX_NODES),
        ("--cpus-per-node", shape.cpus_per_node, 1, MAX_CPUS),
        ("--gpus-per-node", shape.gpus_per_node, 0, MAX_GPUS),
    ):
        if value is not None and not least <= value <= most:
            raise RequestError(f"{name} {value}: a sandbox has {least} to {most}")


def _reshape(shape: Shape, site: Site) -> dict[str, Partition]:
    """The base site's default partition, with the requested nodes."""
    name = site.default_partition or "cpu"
    base = site.partitions[name]
    node = msgspec.structs.replace(
        base.shape,
        cpus=base.shape.cpus if shape.cpus_per_node is None else shape.cpus_per_node,
        gpus=base.shape.gpus if shape.gpus_per_node is None else shape.gpus_per_node,
        gpu_models=base.shape.gpu_models if shape.gpus_per_node is None else (),
    )
    nodes = base.node_count if shape.nodes is None else shape.nodes
    return {name: msgspec.structs.replace(base, node=node, nodes=nodes, max_nodes=None)}


def _shape(group: NodeGroup) -> NodeShape:
    """The node with a number for its memory: Slurm needs one where the site gives none."""
    node = group.shape
    return node if node.mem_bytes is not None else msgspec.structs.replace(node, mem=f"{node.cpus}G")


def _members(partition: Partition, hosts: tuple[Host, ...]) -> tuple[str, ...]:
    """The partition's hosts: of each shape the first ones, as many as it has."""
    return tuple(
        name
        for group in partition.groups
        for name in [host.name for host in hosts if host.shape == _shape(group)][: group.count]
    )


def _hosts_per_shape(partitions: dict[str, Partition], *, requested: int | None) -> dict[NodeShape, int]:
    """Hosts of each node shape. Partitions of one shape share hosts; ``requested`` scales the total down."""
    full: dict[NodeShape, int] = {}
    for group in (group for partition in partitions.values() for group in partition.groups):
        full[_shape(group)] = max(full.get(_shape(group), 0), group.count)
    all_hosts = sum(full.values())
    total = min(all_hosts, max(DEFAULT_NODES, len(full))) if requested is None else requested
    if total > all_hosts:
        raise RequestError(f"--nodes {total}: the site has {all_hosts}", hint="a site is scaled down, never up")
    if total < len(full):
        raise RequestError(f"--nodes {total}: the site has {len(full)} kinds of node, each needs one")
    counts = dict.fromkeys(full, 1)
    for _ in range(total - len(full)):
        least = min((s for s in full if counts[s] < full[s]), key=lambda s: counts[s] / full[s])
        counts[least] += 1
    return counts


def _hosts(prefix: str, counts: dict[NodeShape, int]) -> tuple[Host, ...]:
    shapes = [shape for shape, count in counts.items() for _ in range(count)]
    return tuple(
        Host(name=f"{prefix}{index + 1:02d}", address=f"10.78.0.{11 + index}", shape=shape)
        for index, shape in enumerate(shapes)
    )


def _prefix(site: str) -> str:
    """``tu-hpc`` -> ``tu``: the start of host names, at most 10 characters, with a letter first and last."""
    first = re.sub(r"[^a-z0-9]+", " ", site.lower()).split()[0][:8]
    first = first if first[0].isalpha() else f"n{first}"
    return first if first[-1].isalpha() else f"{first}n"


def _scale(partition: Partition, counts: dict[NodeShape, int]) -> Partition:
    groups = [
        msgspec.structs.replace(group, count=min(group.count, counts[_shape(group)])) for group in partition.groups
    ]
    total = sum(group.count for group in groups)
    return msgspec.structs.replace(
        partition,
        nodes=total if isinstance(partition.nodes, int) else tuple(groups),
        min_nodes=None if partition.min_nodes is None else min(partition.min_nodes, total),
        max_nodes=None if partition.max_nodes is None else min(partition.max_nodes, total),
        defaults=_limit_nodes(partition.defaults, total),
    )


def _limit_nodes(defaults: Resources, nodes: int) -> Resources:
    """A default of more nodes than there are would refuse every job that does not say otherwise."""
    if not isinstance(defaults.nodes, int | str):
        return defaults
    least, most = node_range(defaults.nodes)
    return msgspec.structs.replace(defaults, nodes=f"{min(least, nodes)}-{min(most, nodes)}")


def _all_defaults(site: Site) -> list[Resources]:
    return [site.defaults, *(partition.defaults for partition in site.partitions.values())]


def _accounts(site: Site) -> set[str]:
    """Every account that the site's defaults or partitions name."""
    named = {r.account for r in _all_defaults(site) if isinstance(r.account, str)}
    return named.union(*(partition.accounts or () for partition in site.partitions.values()))


def _qos(site: Site) -> dict[str, str]:
    named = [name for partition in site.partitions.values() for name in partition.qos or ()]
    named += [r.qos for r in _all_defaults(site) if isinstance(r.qos, str)]
    return {"normal": "", **dict.fromkeys(named, ""), **site.qos}


def _features(site: Site) -> tuple[str, ...]:
    """Every feature the site's defaults ask for: a constraint no node meets would refuse every job."""
    constraints = [r.constraint for r in _all_defaults(site) if isinstance(r.constraint, str)]
    return tuple(sorted({feature for text in constraints for feature in re.findall(r"[A-Za-z_][\w.-]*", text)}))


def _licenses(site: Site) -> dict[str, str]:
    """The setting for the site's licences; the database has a licence server's (``NAME@SERVER``)."""
    own = [f"{name}:{count}" for name, count in site.licenses.items() if re.fullmatch(r"[\w.-]+", name)]
    return {"Licenses": ",".join(own)} if own else {}


def loadable_modules(site: Site) -> tuple[str, ...]:
    """The site's modules by name or name and version (``openmpi``, ``gcc/12.2``); a path names a file of the site's."""
    name = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
    return tuple(module for module in site.modules if name.fullmatch(module))


def _containers(site: Site) -> dict[str, Any]:
    """The site's way to run images, with this machine's: where they are, and no folder of the site's to bind."""
    base = Containers(runtime="none" if site.containers.runtime == "none" else "apptainer")
    of_site = {name: getattr(site.containers, name) for name in ("clean_env", "home", "python")}
    return {**msgspec.to_builtins(base), **of_site}


def _overlay(partitions: dict[str, Partition], *, site: Site, mpi: str, modules: tuple[str, ...]) -> dict[str, Any]:
    """Keys that replace the site's size and the software that this machine lacks."""
    return {
        "partitions": msgspec.to_builtins(partitions),
        "defaults": msgspec.to_builtins(_limit_nodes(site.defaults, max(p.node_count for p in partitions.values()))),
        "qos": _qos(site),
        "default_qos": "normal",
        "mpi": mpi,
        "interface": "eth0",
        "address_suffix": "",
        "modules": list(modules),
        "module_init": None,
        "setup": [],
        "environment": {},
        "containers": _containers(site),
        "python": sys.executable,
        "run_root": "runs",
        "scratch": None if site.scratch is None else "/tmp/scratch/$USER/$SLURM_JOB_ID",
        "node_local": ["/tmp", "/var/tmp", "/dev/shm"],
    }


SUFFIX = ".conf"
CARRIED = ("EnforcePartLimits", "JobRequeue", "MaxArraySize", "SelectTypeParameters")
"""Settings of the file that its jobs notice and a sandbox can have too."""
_PAIR = re.compile(r'(\w+)\s*=\s*("[^"]*"|\S*)')
_NO_LIMIT = ("", "unlimited", "infinite")

Fields = Mapping[str, str]
"""One line of slurm.conf: values by their names in lower case, which is how Slurm compares them."""


class ForeignCluster(NamedTuple):
    """A cluster as its slurm.conf describes it."""

    site: Site
    settings: dict[str, str]
    """Those of `CARRIED` that the file has."""


def read_slurm_conf(path: Path) -> ForeignCluster:
    """The cluster that the slurm.conf at ``path`` describes; the file's stem is the site's name.

    Raises ConfigError: unreadable, or without a partition that has nodes; names file and line.
    """
    defaults: dict[str, Fields] = {"nodename": {}, "partitionname": {}}
    nodes: dict[str, NodeShape] = {}
    sets: list[Fields] = []
    partitions: list[tuple[str, Fields]] = []
    settings: dict[str, str] = {}
    for where, fields in _lines(path):
        kind = next(iter(fields))
        if kind in defaults and fields[kind].upper() == "DEFAULT":
            defaults[kind] = {**defaults[kind], **fields}
        elif kind == "nodename":
            values = {**defaults[kind], **fields}
            if values.get("state", "").upper() != "FUTURE":
                nodes |= dict.fromkeys(_expand_hosts(fields[kind], where), _node(values, where))
        elif kind == "nodeset":
            sets.append(fields)
        elif kind == "partitionname":
            partitions.append((where, {**defaults[kind], **fields}))
        else:
            settings |= {name: fields[kind] for name in CARRIED if name.lower() == kind}
    described = {
        fields["partitionname"]: _partition(fields, shapes, where)
        for where, fields in partitions
        if fields.get("maxnodes") != "0"  # no job may run there
        and (shapes := [nodes[name] for name in _partition_nodes(fields, nodes, sets, where)])
    }
    if not described:
        raise ConfigError(f"{path}: no partition with nodes (PartitionName=... Nodes=...)")
    return ForeignCluster(Site(name=path.stem, path=str(path), partitions=described), settings)


def _lines(path: Path) -> Iterator[tuple[str, Fields]]:
    """The lines that say something, with ``file:line``; of files that are included too."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}") from error
    beginning, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        first = first if beginning else number
        content = beginning + line.partition("#")[0]
        beginning = content[:-1] + " " if content.endswith("\\") else ""
        if beginning:
            continue
        included = re.match(r"\s*include\s+(\S+)", content, re.IGNORECASE)
        if included is not None:
            yield from _lines(path.parent / included[1])
        elif fields := {name.lower(): value.strip('"') for name, value in _PAIR.findall(content)}:
            yield f"{path}:{first}", fields


def _expand_hosts(nodelist: str, where: str) -> list[str]:
    try:
        return hosts_of(nodelist)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _count(fields: Fields, name: str, where: str, *, default: int | None = None) -> int | None:
    """A number; ``default``: the line has none, or no limit."""
    text = fields.get(name, "")
    if text.lower() in _NO_LIMIT:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{where}: {name}={text} is no number")
    return int(text)


def _node(fields: Fields, where: str) -> NodeShape:
    """A node, as its jobs can have it."""
    sockets = _count(fields, "sockets", where) or (
        (_count(fields, "boards", where, default=1) or 1) * (_count(fields, "socketsperboard", where, default=1) or 1)
    )
    threads = _count(fields, "threadspercore", where, default=1) or 1
    built = sockets * (_count(fields, "corespersocket", where, default=1) or 1) * threads
    cpus = _count(fields, "cpus", where) or _count(fields, "procs", where) or built
    cpus -= (_count(fields, "corespeccount", where) or 0) * threads
    memory = _count(fields, "realmemory", where)
    if memory is not None:
        memory -= _count(fields, "memspeclimit", where) or 0
    gpus = count_gpus(fields.get("gres", ""))
    models = [model for model in gpus if model is not None and is_name(model)]
    typed = len(models) == len(gpus)
    features = fields.get("features", fields.get("feature", ""))
    names = tuple(filter(None, features.split(",")))
    return NodeShape(
        cpus=max(1, cpus),
        mem=format_megabytes(memory),
        gpus=sum(gpus.values()),
        gpu_model=models[0] if typed and len(models) == 1 else None,
        gpu_models=tuple(f"{model}:{gpus[model]}" for model in models) if typed and len(models) > 1 else (),
        features=names if all(is_name(one, check_slurm_name) for one in names) else None,
    )


def _partition_nodes(fields: Fields, nodes: Mapping[str, NodeShape], sets: list[Fields], where: str) -> list[str]:
    """The partition's nodes, in the order of the file; ``Nodes`` may name sets of nodes, or ALL."""
    names: set[str] = set()
    for part in _expand_hosts(fields.get("nodes", ""), where) if fields.get("nodes") else []:
        chosen = [one for one in sets if one["nodeset"] == part]
        names |= {part, *(name for one in chosen for name in _partition_nodes(one, nodes, [], where))}
        features = {feature for one in chosen for feature in one.get("feature", "").split(",") if feature}
        names |= {name for name, shape in nodes.items() if features & {*(shape.features or ())}}
    return [name for name in nodes if name in names or "ALL" in {part.upper() for part in names}]


def _partition(fields: Fields, shapes: list[NodeShape], where: str) -> Partition:
    name = fields["partitionname"]
    if not is_name(name, check_slurm_name):
        raise ConfigError(f"{where}: a site file cannot hold the name of partition {name}")
    longest = fields.get("maxtime", "")
    least = _count(fields, "minnodes", where) or 1
    groups = tuple(
        NodeGroup(count=count, **{field: getattr(shape, field) for field in NodeShape.__struct_fields__})
        for shape, count in Counter(shapes).items()
    )
    try:
        return Partition(
            nodes=groups,
            default=fields.get("default", "").upper() == "YES",
            min_nodes=least if least > 1 else None,
            max_nodes=_count(fields, "maxnodes", where),
            max_time=None if longest.lower() in _NO_LIMIT else _time(longest),
            max_mem_per_node=format_megabytes(_count(fields, "maxmempernode", where)),
            max_mem_per_cpu=format_megabytes(_count(fields, "maxmempercpu", where)),
            max_cpus_per_node=_count(fields, "maxcpuspernode", where),
            qos=_names(fields, "allowqos"),
            accounts=_names(fields, "allowaccounts"),
        )
    except ValueError as error:
        raise ConfigError(f"{where}: partition {name}: {error}") from error


def _time(text: str) -> str:
    """Slurm reads a number alone as minutes."""
    return f"{text}m" if text.isdecimal() else text


def _names(fields: Fields, name: str) -> tuple[str, ...] | None:
    """Names that are allowed; None: all."""
    text = fields.get(name, "")
    return None if text.upper() in ("", "ALL") else tuple(filter(None, text.split(",")))
