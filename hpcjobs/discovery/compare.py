"""Compares a site file with the live cluster and lists differences with corrections. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from time import monotonic
from typing import Any, Literal, NamedTuple

from hpcjobs.discovery.partitions import ClusterFacts, NodeFacts, PartitionInfo, unusable_reason
from hpcjobs.errors import HpcJobsError, nearest
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.plan import plan
from hpcjobs.run.control import cancel
from hpcjobs.run.submit import JobHandle, submit
from hpcjobs.scheduler.base import State
from hpcjobs.site.models import Partition, Resources, Site
from hpcjobs.site.partition import NodeGroup
from hpcjobs.units import format_count, memory_bytes, time_limit_s

Verdict = Literal["ok", "note", "wrong"]
"""``note``: jobs run, but the file could be more complete, or the fact is unknown here."""
_MIB = 1 << 20
_SHOWN = 3
"""So many nodes that start no job are named."""


class SiteFinding(NamedTuple):
    """One thing that was checked."""

    subject: str
    """The key of the site file, or the trial job."""
    verdict: Verdict
    text: str
    change: str = ""
    """The correction of the site file."""


def compare(site: Site, cluster: ClusterFacts, *, exists: Callable[[str], bool] = os.path.exists) -> list[SiteFinding]:
    """Everything in ``site`` that a login node can compare with its cluster."""
    findings = [*_cluster(site, cluster)]
    for name, partition in site.partitions.items():
        problems = list(_partition(f"partitions.{name}", name, partition, cluster))
        described = f"{format_count(partition.node_count, 'node')}, limits as in the file"
        findings += problems or [SiteFinding(f"partitions.{name}", "ok", described)]
    findings += [*_missing_partitions(site, cluster), *_accounting(site, cluster)]
    findings += [*_mpi(site, cluster), *_gpu_request(site, cluster), *_licenses(site, cluster)]
    findings += _software(site, cluster, exists)
    return findings


def unusable_partitions(findings: Sequence[SiteFinding]) -> frozenset[str]:
    """The partitions of the site file that start no job now."""
    wrong = (finding.subject for finding in findings if finding.verdict == "wrong")
    return frozenset(subject.partition(".")[2] for subject in wrong if subject.startswith("partitions."))


def _cluster(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    live = cluster.config.cluster
    if site.rehearsal or site.cluster is None or live is None:
        return
    if site.cluster.lower() != live.lower():
        yield SiteFinding("cluster", "wrong", f"is {site.cluster}; ClusterName here is {live}", f"cluster: {live}")
    else:
        yield SiteFinding("cluster", "ok", f"{live}, Slurm {cluster.config.version or 'of unknown version'}")


def _partition(subject: str, name: str, partition: Partition, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    live = next((info for info in cluster.partitions if info.name == name), None)
    if live is None:
        known = nearest(name, [info.name for info in cluster.partitions], wraps=False)
        yield SiteFinding(subject, "wrong", f"the cluster has no partition {name}; {known}", f"remove {subject}")
        return
    nodes = [node for node in cluster.nodes if name in node.partitions]
    if (reason := unusable_reason(live, nodes, cluster)) is not None:
        yield SiteFinding(subject, "wrong", f"takes no jobs of yours: {reason}", f"remove {subject}, or ask for access")
        return
    if live.state not in (None, "UP"):
        yield SiteFinding(subject, "wrong", f"State={live.state}: jobs wait", "nothing: wait until it is up")
    yield from _availability(subject, nodes)
    yield from _limits(subject, partition, live)
    if cluster.nodes_are_hidden:
        text = "Slurm hides nodes from you (PrivateData): shapes were not compared"
        yield SiteFinding(f"{subject}.nodes", "note", text)
    else:
        yield from _shapes(subject, partition, nodes)
    names = (("qos", partition.qos, live.allow_qos), ("accounts", partition.accounts, live.allow_accounts))
    for key, stated, allowed in names:
        if allowed is not None and not {*(stated or ())} <= {*allowed}:
            shown = ", ".join(allowed)
            yield SiteFinding(f"{subject}.{key}", "wrong", f"the partition takes {shown}", f"{key}: [{shown}]")


def _count(nodes: Iterable[NodeFacts]) -> int:
    return sum(node.size for node in nodes)


def _availability(subject: str, nodes: Sequence[NodeFacts]) -> Iterator[SiteFinding]:
    """Nodes that start no jobs: a note, or wrong if no other nodes are left."""
    if not (away := [node for node in nodes if node.unavailable]):
        return
    named = [
        f"{name} {node.state}" + (f" ({node.reason})" if node.reason else "") for node in away for name in node.names
    ][:_SHOWN]
    count, every = _count(away), _count(nodes)
    more = f"; and {count - len(named)} more" if count > len(named) else ""
    text = f"{count} of {every} nodes start no job: {'; '.join(named)}{more}"
    if count == every:
        yield SiteFinding(subject, "wrong", text, "nothing: wait until they are back; `sinfo -R` has the reasons")
    else:
        yield SiteFinding(f"{subject}.nodes", "note", text)


def _limits(subject: str, partition: Partition, live: PartitionInfo) -> Iterator[SiteFinding]:
    stated_s, live_s = time_limit_s(partition.max_time), time_limit_s(live.max_time)
    if live_s is not None and (stated_s is None or stated_s > live_s):
        text = f"is {partition.max_time or 'missing'}; MaxTime is {live.max_time}"
        yield SiteFinding(f"{subject}.max_time", "wrong", text, f"max_time: {live.max_time}")
    elif stated_s is not None and (live_s is None or live_s > stated_s):
        text = f"is {partition.max_time}; MaxTime is now {live.max_time or 'unlimited'}"
        yield SiteFinding(f"{subject}.max_time", "note", text, f"max_time: {live.max_time or 'null'}")
    stated_mem = memory_bytes(str(partition.max_mem_per_node)) // _MIB if partition.max_mem_per_node else None
    counts = (
        ("max_nodes", partition.max_nodes, live.max_nodes, "MaxNodes"),
        ("max_cpus_per_node", partition.max_cpus_per_node, live.max_cpus_per_node, "MaxCPUsPerNode"),
        ("max_mem_per_node", stated_mem, live.max_mem_per_node_mb, "MaxMemPerNode"),
    )
    for key, stated, allowed, setting in counts:
        stated_or_all = partition.node_count if key == "max_nodes" and stated is None else stated
        if allowed and (stated_or_all is None or stated_or_all > allowed):
            text = f"is {stated if stated is not None else 'missing'}; {setting} is {allowed}"
            yield SiteFinding(f"{subject}.{key}", "wrong", text, f"{key}: {allowed}")
    if live.min_nodes and live.min_nodes > (partition.min_nodes or 1):
        text = f"is {partition.min_nodes or 'missing'}; MinNodes is {live.min_nodes}"
        yield SiteFinding(f"{subject}.min_nodes", "wrong", text, f"min_nodes: {live.min_nodes}")


def _shapes(subject: str, partition: Partition, nodes: list[NodeFacts]) -> Iterator[SiteFinding]:
    """Check that each group of nodes in the file exists with at least these resources."""
    for group in partition.groups:
        fitting = [node for node in nodes if _fits(node, group)]
        if _count(fitting) >= group.count:
            continue
        have = "; ".join(dict.fromkeys(_shape_text(node) for node in nodes))
        models = {model for node in nodes for model in _gpus_by_model(node) or ()}
        if group.gpu_model is not None and models and group.gpu_model not in models:
            spelled = ", ".join(sorted(models))
            text = f"gpu_model {group.gpu_model}: the GRES of its nodes are called {spelled}"
            yield SiteFinding(f"{subject}.nodes", "wrong", text, f"gpu_model: {spelled}")
        elif fitting:
            text = f"{group.count} nodes of ({_group_text(group)}) are stated, {_count(fitting)} exist"
            yield SiteFinding(f"{subject}.nodes", "wrong", text, f"nodes: {_count(fitting)}")
        else:
            text = f"no node has {_group_text(group)}; its nodes have {have}"
            yield SiteFinding(f"{subject}.nodes", "wrong", text, "the shape that `hpcjobs sites init --dry-run` prints")


def _gpus_by_model(node: NodeFacts) -> dict[str, int] | None:
    """The node's GPUs by type; None: they have no names."""
    if node.gpu_models:
        return {model: int(count) for model, _, count in (text.rpartition(":") for text in node.gpu_models)}
    return {node.gpu_model: node.gpus} if node.gpu_model is not None else None


def _has_models(node: NodeFacts, group: NodeGroup) -> bool:
    """Whether the node has the GPUs of ``group`` under these names, as far as both have names."""
    stated = group.gpu_counts or ({group.gpu_model: group.gpus} if group.gpu_model and group.gpus else {})
    live = _gpus_by_model(node)
    return live is None or all(live.get(model, 0) >= count for model, count in stated.items())


def _fits(node: NodeFacts, group: NodeGroup) -> bool:
    mem_mb = group.mem_bytes // _MIB if group.mem_bytes else 0
    return (
        node.cpus >= group.cpus
        and (node.mem_mb is None or node.mem_mb >= mem_mb)
        and node.gpus >= group.gpus
        and _has_models(node, group)
    )


def _shape_text(node: NodeFacts) -> str:
    gpus = f", {node.gpus} x {','.join(node.gpu_models) or node.gpu_model or 'GPU'}" if node.gpus else ""
    return f"{node.cpus} CPUs, {node.mem_mb} MB{gpus}"


def _group_text(group: NodeGroup) -> str:
    mem = f", {group.mem}" if group.mem is not None else ""
    gpus = f", {group.gpus} x {','.join(group.gpu_models) or group.gpu_model or 'GPU'}" if group.gpus else ""
    return f"{group.cpus} CPUs{mem}{gpus}"


def _missing_partitions(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    for info in cluster.partitions:
        nodes = [node for node in cluster.nodes if info.name in node.partitions]
        if info.name not in site.partitions and unusable_reason(info, nodes, cluster) is None:
            yield SiteFinding("partitions", "note", f"the cluster also has {info.name}", f"partitions.{info.name}")


def _accounting(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    associations = cluster.accounting.associations
    own = sorted({association.account for association in associations or ()})
    usable = {name for association in associations or () for name in association.qos}
    requested = {"defaults": site.defaults} | {
        f"partitions.{name}.defaults": partition.defaults for name, partition in site.partitions.items()
    }
    for subject, resources in requested.items():
        account, qos = resources.account, resources.qos
        if isinstance(account, str) and own and account not in own:
            text = f"is {account}, which is no account of yours; you have {', '.join(own)}"
            yield SiteFinding(f"{subject}.account", "wrong", text, f"account: {own[0]}")
        if isinstance(qos, str) and usable and "qos" in cluster.config.enforces and qos not in usable:
            text = f"is {qos}, which your account cannot use; it has {', '.join(sorted(usable))}"
            yield SiteFinding(f"{subject}.qos", "wrong", text, f"qos: {sorted(usable)[0]}")
    live = {qos.name: qos for qos in cluster.accounting.qos or ()}
    for name, limit in site.qos.items() if live else ():
        if name not in live:
            text = f"there is no such QOS; {nearest(name, live, wraps=False)}"
            yield SiteFinding(f"qos.{name}", "wrong", text, f"remove qos.{name}")
            continue
        longest, stated = time_limit_s(live[name].max_wall), time_limit_s(limit or None)
        if longest is not None and (stated is None or stated > longest):
            text = f"is {limit or 'without limit'}; MaxWall is {live[name].max_wall}"
            yield SiteFinding(f"qos.{name}", "wrong", text, f"{name}: {live[name].max_wall}")


def _mpi(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    if site.mpi is None or cluster.mpi_types is None:
        return
    if site.mpi in cluster.mpi_types:
        yield SiteFinding("mpi", "ok", f"srun has {site.mpi}")
    else:
        types = ", ".join(cluster.mpi_types)
        yield SiteFinding("mpi", "wrong", f"srun --mpi=list has no {site.mpi}; it has {types}", f"mpi: one of {types}")


def _gpu_request(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    select = cluster.config.select_type
    modern = site.gpu_request in ("gpus-per-node", "gpus-per-task")
    if any(node.gpus for node in cluster.nodes) and select not in (None, "select/cons_tres") and modern:
        yield SiteFinding("gpu_request", "wrong", f"is {site.gpu_request}; SelectType is {select}", "gpu_request: gres")


def _licenses(site: Site, cluster: ClusterFacts) -> Iterator[SiteFinding]:
    live = dict(cluster.licenses or ())
    for name, count in site.licenses.items() if cluster.licenses is not None else ():
        if name not in live:
            text = f"Slurm has no such licence; {nearest(name, live, wraps=False)}"
            yield SiteFinding(f"licenses.{name}", "wrong", text, f"remove {name}")
        elif count != live[name]:
            verdict: Verdict = "wrong" if count > live[name] else "note"
            text = f"is {count}; Slurm has {live[name]}"
            yield SiteFinding(f"licenses.{name}", verdict, text, f"{name}: {live[name]}")


def list_untried(site: Site) -> Iterator[SiteFinding]:
    """Notes of a check without jobs, about facts that only jobs can show."""
    tried = "not looked at: `sites check --run` compares it with a node"
    if site.interface is not None:
        yield SiteFinding("interface", "note", f"{site.interface}: {tried}")
    for name in site.launchers or ():
        yield SiteFinding("launchers", "note", f"{name}: not tried: `sites check --run` starts a job by it")
    if gpus := [name for name, partition in site.partitions.items() if any(group.gpus for group in partition.groups)]:
        yield SiteFinding("gpu_request", "note", f"no GPU of {', '.join(gpus)} was requested: `sites check --run` does")


def _software(site: Site, cluster: ClusterFacts, exists: Callable[[str], bool]) -> Iterator[SiteFinding]:
    names = None if cluster.modules is None else cluster.modules.names
    for module in site.modules:
        if names is None:
            yield SiteFinding("modules", "note", f"{module}: a login shell here has no `module`, so nobody can tell")
        elif module in names or any(name.startswith(f"{module}/") for name in names):
            yield SiteFinding("modules", "ok", f"module avail has {module}")
        else:
            text = f"module avail has no {module}; {nearest(module, names, wraps=False)}"
            yield SiteFinding("modules", "wrong", text[:300], f"remove {module}, or name one that there is")
    if site.module_init is not None and not exists(site.module_init):
        yield SiteFinding("module_init", "note", f"{site.module_init} does not exist on this host", "module_init")
    runtimes = [runtime.name for runtime in cluster.runtimes]
    stated = site.containers.runtime
    if stated not in ("none", *runtimes):
        shown = ", ".join(runtimes) or "none"
        text = f"{stated} is not on this host (here: {shown}); the nodes may have it"
        yield SiteFinding("containers.runtime", "note", text)


_MARK = "hpcjobs-check-interfaces"
_MARK_OF_GPUS = "hpcjobs-check-gpus"
_GPUS_OF_TASK = "${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-${ZE_AFFINITY_MASK-}}}"
_PROGRAM = ("sh", "-c", f"echo {_MARK} $(ls /sys/class/net); echo {_MARK_OF_GPUS} {_GPUS_OF_TASK}")
_LINES = 3


class Trial(NamedTuple):
    """One trial job, or the reason for its absence."""

    subject: str
    partition: str | None
    """None: a plugin of the cluster chooses it."""
    handle: JobHandle | None
    refusal: str = ""
    gpus: int = 0


def run_trials(
    site: Site,
    name: str,
    *,
    time: str,
    timeout_s: float,
    without: Collection[str] = (),
    report: Callable[[str], None],
) -> list[SiteFinding]:
    """Run one job in each partition by each launcher of the file, or by the site's default launcher.

    The job requests a GPU if every node of the partition has GPUs. Partitions of ``without`` get no job. If a plugin of
    the cluster chooses the partition, jobs name none: one runs without GPUs, one with a GPU. Jobs that have not ended
    after ``timeout_s`` are cancelled; an interrupt cancels all jobs.
    """
    launchers: tuple[str | None, ...] = site.launchers or (None,)
    usable = {key: partition for key, partition in site.partitions.items() if key not in without}
    trials: list[Trial] = []
    try:
        for request, launcher in product(_list_requests(site, usable), launchers):
            trials.append(_start(site, name, request, launcher, time))
        submitted = sum(trial.handle is not None for trial in trials)
        report(f"{format_count(submitted, 'job')} submitted to site {site.name}; waiting")
        return list(dict.fromkeys(_finish(trials, site, deadline=monotonic() + timeout_s)))
    except BaseException:
        _cancel(trials, report)
        raise


def _cancel(trials: Sequence[Trial], report: Callable[[str], None]) -> None:
    """Cancel jobs that have not ended."""
    try:
        outcome = cancel(trial.handle.entry for trial in trials if trial.handle is not None)
    except HpcJobsError as error:
        ids = " ".join(trial.handle.id for trial in trials if trial.handle is not None)
        report(f"the trial jobs could not be cancelled: {error.message}; `hpcjobs cancel {ids}` tries again")
        return
    if outcome.cancelled:
        report(f"cancelled the trial jobs {' '.join(outcome.cancelled)}")


class _Request(NamedTuple):
    """The request of a trial job; ``partition`` None: it names none."""

    partition: str | None
    nodes: int
    gpus: int


def _list_requests(site: Site, usable: Mapping[str, Partition]) -> list[_Request]:
    requests = []
    for name, partition in usable.items():
        gpus = int(site.gpu_request != "none" and all(group.gpus for group in partition.groups))
        requests.append(_Request(name, partition.min_nodes or 1, gpus))
    if not site.chooses_partition:
        return requests
    least: dict[int, int] = {}
    for request in requests:
        least[request.gpus] = min(request.nodes, least.get(request.gpus, request.nodes))
    return [_Request(None, nodes, gpus) for gpus, nodes in sorted(least.items())]


def _start(site: Site, name: str, request: _Request, launcher: str | None, time: str) -> Trial:
    partition, gpus = request.partition, request.gpus
    where = f"in {partition}" if partition is not None else f"with {'a' if gpus else 'no'} GPU and no partition named"
    subject = f"job {where} by {launcher or 'the default launcher'}"
    options: dict[str, Any] = {} if partition is None else {"partition": partition}
    spec = Layer("sites check", JobSpec(resources=Resources(gpus_per_node=gpus))) if gpus else None
    try:
        planned = plan(
            _PROGRAM, site, launcher=launcher, time=time, nodes=request.nodes, ntasks_per_node=1,
            name="sites-check", made_by=f"hpcjobs sites check --run {name}", spec=spec, **options,
        )  # fmt: skip
        return Trial(subject, partition, submit(planned), gpus=gpus)
    except HpcJobsError as error:
        return Trial(subject, partition, None, " ".join(error.message.split()))


def _finish(trials: Sequence[Trial], site: Site, *, deadline: float) -> Iterator[SiteFinding]:
    """Result of each job; jobs that have not ended by ``deadline`` are cancelled."""
    for trial in trials:
        if trial.handle is None:
            yield SiteFinding(trial.subject, "wrong", trial.refusal, "what the message names")
            continue
        try:
            trial.handle.wait(timeout_s=max(0.0, deadline - monotonic()))
        except TimeoutError:
            reasons = {record.reason or record.state.value for record in trial.handle.records}
            trial.handle.cancel()
            text = f"job {trial.handle.id} had not ended in time: {', '.join(sorted(reasons))}"
            yield SiteFinding(trial.subject, "wrong", text, "a partition that starts jobs, or --timeout")
            continue
        yield from _judge(trial, trial.handle, site)


def _judge(trial: Trial, handle: JobHandle, site: Site) -> Iterator[SiteFinding]:
    log = handle.logs()
    if (state := handle.state) is not State.COMPLETED:
        lines = " / ".join(line.strip() for line in log.splitlines()[-_LINES:])
        text = f"job {handle.id} is {state.value}: {lines}"
        yield SiteFinding(trial.subject, "wrong", text, f"hpcjobs why {handle.id}")
        return
    moved_to = next((record.partition for record in handle.records if record.partition is not None), trial.partition)
    if trial.partition is None:
        yield SiteFinding(trial.subject, "ok", f"job {handle.id} ran" + (f" in {moved_to}" if moved_to else ""))
    elif moved_to != trial.partition:
        text = f"job {handle.id} ran in {moved_to}: the cluster moved it, so {trial.partition} was not tried"
        yield SiteFinding(trial.subject, "note", text)
    else:
        yield SiteFinding(trial.subject, "ok", f"job {handle.id} ran")
    names = _words_after(log, _MARK)
    if names and site.interface is not None:
        shown = ", ".join(names)
        if site.interface in names:
            yield SiteFinding("interface", "ok", f"the nodes have {site.interface}")
        else:
            text = f"is {site.interface}; the node of job {handle.id} has {shown}"
            yield SiteFinding("interface", "wrong", text, f"interface: one of {shown}")
    if trial.gpus:
        yield _judge_gpus(log, handle, site)


def _judge_gpus(log: str, handle: JobHandle, site: Site) -> SiteFinding:
    if devices := _words_after(log, _MARK_OF_GPUS):
        text = f"{site.gpu_request} gives GPUs: job {handle.id} saw {' '.join(devices)}"
        return SiteFinding("gpu_request", "ok", text)
    text = f"by {site.gpu_request} job {handle.id} got a GPU, and its task saw none (CUDA_, ROCR_VISIBLE_DEVICES)"
    change = "gpu_request: gres, or ask those who run the cluster for gres.conf"
    return SiteFinding("gpu_request", "wrong", text, change)


def _words_after(log: str, mark: str) -> list[str]:
    """The words that the program printed after ``mark``."""
    line = next((line for line in log.splitlines() if mark in line), "")
    return line.partition(mark)[2].split()
