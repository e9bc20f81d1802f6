"""Another cluster's slurm.conf as a site: its nodes, partitions and limits. What no job notices is left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.site.checks import check_name
from hpcjobs.site.models import NodeGroup, NodeShape, Partition, Site
from hpcjobs.units import LEAST_BARE_MEMORY

SUFFIX = ".conf"
CARRIED = ("EnforcePartLimits", "JobRequeue", "MaxArraySize", "SelectTypeParameters")
"""Settings of the file that its jobs notice and a sandbox can have too."""
_PAIR = re.compile(r'(\w+)\s*=\s*("[^"]*"|\S*)')
_GPU = re.compile(r"gpu(?::(?P<model>[A-Za-z]\w*))?(?::(?P<count>\d+))?(?:\(.*\))?\Z", re.ASCII | re.IGNORECASE)
_NO_LIMIT = ("", "unlimited", "infinite")

Words = Mapping[str, str]
"""One line of slurm.conf: values by their names in lower case, which is how Slurm compares them."""


class ForeignCluster(NamedTuple):
    """What a slurm.conf says of a cluster."""

    site: Site
    settings: dict[str, str]
    """Those of `CARRIED` that the file has."""


def read_slurm_conf(path: Path) -> ForeignCluster:
    """The cluster that the slurm.conf at ``path`` describes; the file's stem is the site's name.

    Raises:
        ConfigError: unreadable, or without a partition that has nodes; names file and line.
    """
    defaults: dict[str, Words] = {"nodename": {}, "partitionname": {}}
    nodes: dict[str, NodeShape] = {}
    sets: list[Words] = []
    partitions: list[tuple[str, Words]] = []
    settings: dict[str, str] = {}
    for where, words in _lines(path):
        kind = next(iter(words))
        if kind in defaults and words[kind].upper() == "DEFAULT":
            defaults[kind] = {**defaults[kind], **words}
        elif kind == "nodename":
            values = {**defaults[kind], **words}
            if values.get("state", "").upper() != "FUTURE":
                nodes |= dict.fromkeys(_hosts(words[kind], where), _node(values, where))
        elif kind == "nodeset":
            sets.append(words)
        elif kind == "partitionname":
            partitions.append((where, {**defaults[kind], **words}))
        else:
            settings |= {name: words[kind] for name in CARRIED if name.lower() == kind}
    described = {
        words["partitionname"]: _partition(words, shapes, where)
        for where, words in partitions
        if (shapes := [nodes[name] for name in _members(words, nodes, sets, where)])
    }
    if not described:
        raise ConfigError(f"{path}: no partition with nodes (PartitionName=... Nodes=...)")
    return ForeignCluster(Site(name=path.stem, path=str(path), partitions=described), settings)


def _lines(path: Path) -> Iterator[tuple[str, Words]]:
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
        elif words := {name.lower(): value.strip('"') for name, value in _PAIR.findall(content)}:
            yield f"{path}:{first}", words


def _hosts(nodelist: str, where: str) -> list[str]:
    try:
        return hosts_of(nodelist)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _count(words: Words, name: str, where: str, *, default: int | None = None) -> int | None:
    """A number; ``default``: the line has none, or no limit."""
    text = words.get(name, "")
    if text.lower() in _NO_LIMIT:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{where}: {name}={text} is no number")
    return int(text)


def _node(words: Words, where: str) -> NodeShape:
    """A node, as its jobs can have it."""
    sockets = _count(words, "sockets", where) or (
        (_count(words, "boards", where, default=1) or 1) * (_count(words, "socketsperboard", where, default=1) or 1)
    )
    threads = _count(words, "threadspercore", where, default=1) or 1
    built = sockets * (_count(words, "corespersocket", where, default=1) or 1) * threads
    cpus = _count(words, "cpus", where) or _count(words, "procs", where) or built
    cpus -= (_count(words, "corespeccount", where) or 0) * threads
    memory = _count(words, "realmemory", where)
    if memory is not None:
        memory -= _count(words, "memspeclimit", where) or 0
    gpus, model = _gpus(words.get("gres", ""))
    features = words.get("features", words.get("feature", ""))
    names = tuple(filter(None, features.split(",")))
    return NodeShape(
        cpus=max(1, cpus),
        mem=_memory(memory),
        gpus=gpus,
        gpu_model=model,
        features=names if all(map(_is_name, names)) else None,
    )


def _gpus(gres: str) -> tuple[int, str | None]:
    """Count and model of ``gpu:a100:4,nvme:1``; of several models None."""
    matches = [match for part in gres.split(",") if (match := _GPU.match(part.strip()))]
    models = {match["model"] for match in matches}
    return sum(int(match["count"] or 1) for match in matches), models.pop() if len(models) == 1 else None


def _memory(megabytes: int | None) -> int | str | None:
    """As a site file has it: few megabytes need their unit."""
    if not megabytes:
        return None
    return megabytes if megabytes >= LEAST_BARE_MEMORY else f"{megabytes}M"


def _is_name(text: str) -> bool:
    try:
        check_name(text, "name")
    except ValueError:
        return False
    return True


def _members(words: Words, nodes: Mapping[str, NodeShape], sets: list[Words], where: str) -> list[str]:
    """The partition's nodes, in the order of the file; ``Nodes`` may name sets of nodes, or ALL."""
    names: set[str] = set()
    for part in _hosts(words.get("nodes", ""), where) if words.get("nodes") else []:
        chosen = [one for one in sets if one["nodeset"] == part]
        names |= {part, *(name for one in chosen for name in _members(one, nodes, [], where))}
        features = {feature for one in chosen for feature in one.get("feature", "").split(",") if feature}
        names |= {name for name, shape in nodes.items() if features & {*(shape.features or ())}}
    return [name for name in nodes if name in names or "ALL" in {part.upper() for part in names}]


def _partition(words: Words, shapes: list[NodeShape], where: str) -> Partition:
    name = words["partitionname"]
    if not _is_name(name):
        raise ConfigError(f"{where}: a site file cannot hold the name of partition {name}")
    longest = words.get("maxtime", "")
    least = _count(words, "minnodes", where) or 1
    groups = tuple(
        NodeGroup(count=count, **{field: getattr(shape, field) for field in NodeShape.__struct_fields__})
        for shape, count in Counter(shapes).items()
    )
    try:
        return Partition(
            nodes=groups,
            default=words.get("default", "").upper() == "YES",
            min_nodes=least if least > 1 else None,
            max_nodes=_count(words, "maxnodes", where),
            max_time=None if longest.lower() in _NO_LIMIT else _time(longest),
            max_mem_per_node=_memory(_count(words, "maxmempernode", where)),
            max_mem_per_cpu=_memory(_count(words, "maxmempercpu", where)),
            max_cpus_per_node=_count(words, "maxcpuspernode", where),
            qos=_names(words, "allowqos"),
            accounts=_names(words, "allowaccounts"),
        )
    except ValueError as error:
        raise ConfigError(f"{where}: partition {name}: {error}") from error


def _time(text: str) -> str:
    """Slurm reads a number alone as minutes."""
    return f"{text}m" if text.isdecimal() else text


def _names(words: Words, name: str) -> tuple[str, ...] | None:
    """Names that are allowed; None: all."""
    text = words.get(name, "")
    return None if text.upper() in ("", "ALL") else tuple(filter(None, text.split(",")))
