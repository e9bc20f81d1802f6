"""Checks of a cluster before any money is spent: offline, from the site file and the rendered folder.

Terraform itself drops unknown keys of object-valued arguments in silence, and asks a registry for the rest; here both
are read from the schemas in ``schemas/``, which ``tools/provider-schemas`` took from the providers.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.cloud.provider import Kind, Level, gib
from hpcjobs.cloud.section import PROVIDERS, Cluster, Provider
from hpcjobs.errors import HpcJobsError, nearest


class CostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Money per hour of the whole cluster, in ``currency``; ``None`` where the site has no prices.

    A node costs node_hour + GPUs x gpu_hour + CPUs x cpu_hour, without unknown prices; the head's price is added.
    """

    nodes: int
    per_hour: float | None
    currency: str
    left_out: tuple[str, ...]
    """Costs that the estimate leaves out."""


def estimate(cluster: Cluster) -> CostEstimate:
    """Estimate the cost of ``nodes.max`` nodes."""
    prices, nodes, head = cluster.site.prices, cluster.cloud.nodes.max, cluster.cloud.head.hour
    parts = (
        (prices.node_hour, 1),
        (prices.gpu_hour, cluster.gpus),
        (prices.cpu_hour, cluster.machine.cpus),
    )
    node = [price * count for price, count in parts if price is not None]
    left_out = ["disks and shared filesystem", "traffic", *(["the head"] if head is None else [])]
    if cluster.cloud.spot:
        left_out.append("what spot nodes cost less")
    per_hour = round(nodes * sum(node) + (head or 0), 4) if node else None
    return CostEstimate(nodes=nodes, per_hour=per_hour, currency=prices.currency, left_out=tuple(left_out))


_SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\"private_key\"|AIza[\w-]{35}|ya29\.[\w-]{20}|AKIA[0-9A-Z]{16}"
    r"|gh[pousr]_\w{36}|hf_\w{30}"
)


class ClusterFinding(msgspec.Struct, frozen=True):
    """One finding; an ``error`` would fail or do harm."""

    level: Level
    about: str
    text: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of ``hpcjobs cloud check``."""

    site: str
    provider: str
    checked_against: str
    """Provider and version of the schema that the files were checked against."""
    findings: tuple[ClusterFinding, ...]
    estimate: CostEstimate

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)


def check(cluster: Cluster, files: Mapping[str, str], kind: Kind = "vms") -> Report:
    """Check ``files`` (as rendered for ``kind``, or edited since) and the cluster: schema, quota, budget, security."""
    schema = provider_schema(cluster.cloud.provider)
    priced = estimate(cluster)
    findings = [ClusterFinding("error", "terraform", problem) for problem in problems(files, cluster.cloud.provider)]
    findings += [
        *_secrets(files),
        *_quota(cluster),
        *_money(cluster, priced),
        *_security(cluster, kind),
        *_unsaid(cluster),
    ]
    return Report(
        site=cluster.name,
        provider=cluster.cloud.provider,
        checked_against=f"{schema['source']} {schema['version']}",
        findings=tuple(sorted(findings, key=lambda f: ("error", "warning", "note").index(f.level))),
        estimate=priced,
    )


def _secrets(files: Mapping[str, str]) -> Iterator[ClusterFinding]:
    for name, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if _SECRET.search(line):
                yield ClusterFinding(
                    "error", "secrets", f"{name}:{number} looks like a key or token; it would stand in the state"
                )


def _quota(cluster: Cluster) -> Iterator[ClusterFinding]:
    """Compare CPUs, GPUs and disks with the quota in the site file; the provider is not asked."""
    cloud, nodes = cluster.cloud, cluster.cloud.nodes.max
    disk = (nodes + 1) * gib(cloud.disk.size) + (gib(cloud.shared.size) if cloud.shared.kind == "nfs" else 0)
    allowed_disk = gib(cloud.quota.disk) if cloud.quota.disk else None
    for what, needed, allowed in (
        ("CPUs", nodes * cluster.machine.cpus + cluster.head.cpus, cloud.quota.cpus),
        ("GPUs", nodes * cluster.gpus, cloud.quota.gpus),
        ("GiB of disks", disk, allowed_disk),
    ):
        if allowed is not None and needed > allowed:
            yield ClusterFinding("error", "quota", f"{needed} {what} are needed, the site's quota says {allowed}")
        elif needed:
            known = "the site says no quota" if allowed is None else f"of {allowed}"
            yield ClusterFinding("note", "quota", f"{needed} {what} at most ({known})")


def _money(cluster: Cluster, priced: CostEstimate) -> Iterator[ClusterFinding]:
    budget = cluster.cloud.budget
    if priced.per_hour is None:
        yield ClusterFinding("warning", "price", "the site has no prices (prices: node_hour or gpu_hour): no estimate")
    elif budget is not None and priced.per_hour * budget.hours > budget.amount:
        cost = f"{priced.per_hour * budget.hours:.2f}"
        text = f"{budget.hours:g} hours cost about {cost} {priced.currency}, the budget is {budget.amount:g}"
        yield ClusterFinding("error", "budget", text)
    elif budget is None:
        yield ClusterFinding("note", "budget", "none said: the cluster costs until `hpcjobs cloud down`")


def _security(cluster: Cluster, kind: Kind) -> Iterator[ClusterFinding]:
    cloud = cluster.cloud
    if kind == "soperator":
        yield ClusterFinding(
            "warning", "ssh", "Soperator's login node may be tried from anywhere: its recipe has no ssh_from"
        )
    elif cloud.network.is_open:
        yield ClusterFinding("warning", "ssh", "a large part of the world may try (open_to_world is set); keys only")
    else:
        yield ClusterFinding(
            "note", "ssh", f"to the head alone, from {', '.join(cloud.network.ssh_from) or 'nowhere yet'}"
        )
    key = cloud.disk.encryption_key
    yield ClusterFinding("note", "encryption", f"disks: {key or 'at rest, with keys that the provider manages'}")
    for level, about, text in PROVIDERS[cloud.provider].describe_security(cloud):
        yield ClusterFinding(level, about, text)


def _unsaid(cluster: Cluster) -> Iterator[ClusterFinding]:
    cloud = cluster.cloud
    for name, value in (
        ("project", cloud.project),
        ("ssh.keys", cloud.ssh.keys),
        ("network.ssh_from", cloud.network.ssh_from),
    ):
        if not value:
            yield ClusterFinding("warning", name, f"not said: add cloud.{name} to your copy of the site before `up`")


_META = {"count", "for_each", "depends_on", "lifecycle", "provider", "provisioner", "connection", "timeouts"}
"""Arguments that Terraform itself accepts in every resource."""
_SCHEMA_HINT = "tools/provider-schemas of the repository writes it"
_KINDS = {"resource": "resource_schemas", "data": "data_source_schemas"}


def provider_schema(provider: Provider) -> dict[str, Any]:
    """The shipped schema of the resources that the module of ``provider`` uses. Raises HpcJobsError: there is none."""
    path = Path(__file__).parent / "schemas" / f"{provider}.json"
    if not path.exists():
        raise HpcJobsError(f"{path}: missing, so Terraform files of {provider} cannot be checked", hint=_SCHEMA_HINT)
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def problems(files: Mapping[str, str], provider: Provider) -> list[str]:
    """Problems that the provider would find in ``files`` (name -> text; only ``*.tf`` are read).

    Raises HpcJobsError: python-hcl2 is missing.
    """
    schema = provider_schema(provider)
    return [
        f"{name}: {problem}"
        for name, text in sorted(files.items())
        if name.endswith(".tf")
        for problem in _file_problems(text, schema)
    ]


def _file_problems(text: str, schema: Mapping[str, Any]) -> Iterator[str]:
    try:
        import hcl2
    except ImportError as error:
        raise HpcJobsError("python-hcl2 is missing", hint="pip install 'hpcjobs[cloud]'") from error
    try:
        tree = hcl2.load(io.StringIO(text))
    except Exception as error:  # hcl2 passes on the errors of its parser
        yield f"not valid HCL: {str(error).splitlines()[0]}"
        return
    for kind, key in _KINDS.items():
        for typed in tree.get(kind, ()):
            for quoted, named in typed.items():
                for name, body in named.items():
                    where = f"{_bare(quoted)}.{_bare(name)}"
                    if (block := schema[key].get(_bare(quoted))) is None:
                        yield f"{where}: {nearest(_bare(quoted), schema[key])}"
                    else:
                        own = {key: value for key, value in body.items() if key not in _META}
                        yield from _block_problems(where, own, block)


def _block_problems(where: str, body: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[str]:
    attributes, blocks = block["attributes"], block.get("block_types", {})
    dynamic = {_bare(name): item for group in body.get("dynamic", ()) for name, item in group.items()}
    assigned = {_bare(key) for key in body if not key.startswith("__") and key != "dynamic"}
    settable = {name for name, a in attributes.items() if a.get("required") or a.get("optional")}
    for name in sorted((assigned | set(dynamic)) - settable - set(blocks)):
        yield f"{where}.{name}: no such argument; {nearest(name, settable | set(blocks))}"
    required = {name for name, a in attributes.items() if a.get("required")}
    required |= {name for name, b in blocks.items() if b.get("min_items")}
    for name in sorted(required - assigned - set(dynamic)):
        yield f"{where}.{name}: missing"
    for key, value in body.items():
        name = _bare(key)
        if name in blocks:
            for item in value:
                yield from _block_problems(f"{where}.{name}", item, blocks[name]["block"])
        elif name in settable:
            yield from _value_problems(f"{where}.{name}", value, attributes[name])
    for name, item in dynamic.items():
        for content in item["content"] if name in blocks else ():
            yield from _block_problems(f"{where}.{name}", content, blocks[name]["block"])


def _value_problems(where: str, value: Any, attribute: Mapping[str, Any]) -> Iterator[str]:
    """Yield literal values of the wrong type, and unknown or missing keys of nested objects."""
    nested = attribute.get("nested_type")
    if nested is not None:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _block_problems(where, item, nested)
        return
    kind = attribute["type"]
    wrong = {
        "number": isinstance(value, bool) or (isinstance(value, str) and value.startswith('"')),
        "bool": not isinstance(value, bool) and not str(value).startswith("${"),
    }
    if isinstance(kind, str) and value is not None and wrong.get(kind):
        yield f"{where}: expected a {kind}, not {value}"


def _bare(name: str) -> str:
    return name.strip('"')
