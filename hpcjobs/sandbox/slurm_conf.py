"""Reads another cluster's slurm.conf as a site: nodes, partitions and limits that jobs notice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.site.checks import check_name, check_slurm_name
from hpcjobs.site.models import NodeGroup, NodeShape, Partition, Site
from hpcjobs.site.partition import count_gpus
from hpcjobs.units import LEAST_BARE_MEMORY

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

    Raises:
        ConfigError: unreadable, or without a partition that has nodes; names file and line.
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
                nodes |= dict.fromkeys(_hosts(fields[kind], where), _node(values, where))
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
        and (shapes := [nodes[name] for name in _members(fields, nodes, sets, where)])
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


def _hosts(nodelist: str, where: str) -> list[str]:
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
    models = [model for model in gpus if model is not None and _is_name(model)]
    typed = len(models) == len(gpus)
    features = fields.get("features", fields.get("feature", ""))
    names = tuple(filter(None, features.split(",")))
    return NodeShape(
        cpus=max(1, cpus),
        mem=_memory(memory),
        gpus=sum(gpus.values()),
        gpu_model=models[0] if typed and len(models) == 1 else None,
        gpu_models=tuple(f"{model}:{gpus[model]}" for model in models) if typed and len(models) > 1 else (),
        features=names if all(_is_name(one, check_slurm_name) for one in names) else None,
    )


def _memory(megabytes: int | None) -> int | str | None:
    """As a site file has it: few megabytes need their unit."""
    if not megabytes:
        return None
    return megabytes if megabytes >= LEAST_BARE_MEMORY else f"{megabytes}M"


def _is_name(text: str, check: Callable[[str, str], None] = check_name) -> bool:
    try:
        check(text, "name")
    except ValueError:
        return False
    return True


def _members(fields: Fields, nodes: Mapping[str, NodeShape], sets: list[Fields], where: str) -> list[str]:
    """The partition's nodes, in the order of the file; ``Nodes`` may name sets of nodes, or ALL."""
    names: set[str] = set()
    for part in _hosts(fields.get("nodes", ""), where) if fields.get("nodes") else []:
        chosen = [one for one in sets if one["nodeset"] == part]
        names |= {part, *(name for one in chosen for name in _members(one, nodes, [], where))}
        features = {feature for one in chosen for feature in one.get("feature", "").split(",") if feature}
        names |= {name for name, shape in nodes.items() if features & {*(shape.features or ())}}
    return [name for name in nodes if name in names or "ALL" in {part.upper() for part in names}]


def _partition(fields: Fields, shapes: list[NodeShape], where: str) -> Partition:
    name = fields["partitionname"]
    if not _is_name(name, check_slurm_name):
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
            max_mem_per_node=_memory(_count(fields, "maxmempernode", where)),
            max_mem_per_cpu=_memory(_count(fields, "maxmempercpu", where)),
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
