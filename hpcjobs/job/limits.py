"""Checks of a job against the limits of its partition and against the policy of the centre."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.layers import Values
from hpcjobs.job.models import Job
from hpcjobs.site.library import find_clusters, policies_of_job
from hpcjobs.site.models import AppliedPolicy, NodeGroup, Partition, Policy, Site
from hpcjobs.site.resources import FIELDS, GPU_FIELDS, gpus_and_model
from hpcjobs.site.search import list_centre_files
from hpcjobs.site.yaml_file import read_file, where_of
from hpcjobs.units import check_array, format_count, human_bytes, memory_bytes, time_limit_s

_SIMPLE_CONSTRAINT = re.compile(r"[\w.:+@/=~-]+(?:[&|,][\w.:+@/=~-]+)*\Z", re.ASCII)


class _Need(NamedTuple):
    """Something the job needs on each node."""

    text: str
    """The request, and its source."""
    most: str
    """The most that the nodes of the partition have."""


def partition_problems(job: Job, name: str, partition: Partition) -> Iterator[str]:
    """Return the reasons against ``job`` in ``partition``; empty if enough nodes have the requested resources."""
    limits = list(_limit_problems(job, name, partition))
    yield from limits
    unmet = [(group, _unmet(job, partition, group)) for group in partition.groups]
    fitting = sum(group.count for group, needs in unmet if not needs)
    if not fitting:
        yield from _shape_problems(name, partition, [needs for _, needs in unmet])
    elif not limits and job.nodes + job.spare > fitting:
        yield (
            f"{job.describe_option('nodes')}: partition {name} has {fitting} nodes with what each node of the job needs"
            f" (its nodes: {_nodes(partition)})"
        )


def _limit_problems(job: Job, name: str, partition: Partition) -> Iterator[str]:
    most = min(partition.max_nodes or partition.node_count, partition.node_count)
    if job.nodes + job.spare > most:
        yield f"{job.describe_option('nodes')}: partition {name} allows {most}"
    if partition.min_nodes is not None and (job.max_nodes or job.nodes + job.spare) < partition.min_nodes:
        yield f"{job.describe_option('nodes')}: partition {name} needs at least {partition.min_nodes}"
    longest = time_limit_s(partition.max_time)
    for field in ("time", "time_min"):
        text = getattr(job.resources, field)
        requested_s = time_limit_s(text)
        if text is not None and longest is not None and (requested_s is None or requested_s > longest):
            yield f"{job.describe_option(field)}: partition {name} allows {partition.max_time}"
    account = job.resources.account
    if account and partition.accounts is not None and account not in partition.accounts:
        yield f"{job.describe_option('account')}: partition {name} accepts {', '.join(partition.accounts)}"
    memory = _memory(job, None)
    if partition.max_mem_per_node is not None and memory is not None:
        field, size = memory
        if size == 0 or size > memory_bytes(str(partition.max_mem_per_node)):
            yield f"{job.describe_option(field)}: partition {name} allows {partition.max_mem_per_node} per node"


def _memory(job: Job, group: NodeGroup | None) -> tuple[str, int] | None:
    """The option that asks for memory, and the bytes per node; of ``mem=0`` all that a node of ``group`` has."""
    requested = job.resources
    if requested.mem and job.memory_request != "none":
        size = memory_bytes(str(requested.mem))
        return "mem", size or (group.mem_bytes or 0 if group else 0)
    if requested.mem_per_cpu:
        return "mem_per_cpu", memory_bytes(str(requested.mem_per_cpu)) * _cpus(job)
    if requested.mem_per_gpu and job.gpus_per_node:
        return "mem_per_gpu", memory_bytes(str(requested.mem_per_gpu)) * job.gpus_per_node
    return None


def _cpus(job: Job) -> int:
    return job.ntasks_per_node * (job.resources.cpus_per_task or 1)


def _cpus_for_memory(job: Job, partition: Partition, group: NodeGroup) -> int:
    """The CPUs per node that Slurm takes for the job's memory, where a CPU has no more than a limit."""
    memory, requested = _memory(job, group), job.resources
    if partition.max_mem_per_cpu is None or memory is None:
        return 0
    limit = memory_bytes(str(partition.max_mem_per_cpu))
    if memory[0] == "mem_per_cpu" and requested.mem_per_cpu:
        return _cpus(job) * -(-memory_bytes(str(requested.mem_per_cpu)) // limit)
    return -(-memory[1] // limit)


def _unmet(job: Job, partition: Partition, group: NodeGroup) -> dict[str, _Need]:
    """Return the requested resources that a node of ``group`` lacks, by kind."""
    unmet: dict[str, _Need] = {}
    requested, cpus, memory = job.resources, _cpus(job), _memory(job, group)
    available = min(group.cpus, partition.max_cpus_per_node or group.cpus)
    limited = " for jobs of it" if available < group.cpus else ""
    if cpus > available:
        each = f"cpus_per_task={requested.cpus_per_task or 1}"
        text = f"{job.describe_option('ntasks_per_node')} x {each} = {format_count(cpus, 'CPU')}"
        unmet["cpus"] = _Need(text, f"{available}{limited}")
    elif requested.exclusive and available < group.cpus:
        unmet["cpus"] = _Need(job.describe_option("exclusive"), f"{available} of {group.cpus} CPUs{limited}")
    elif memory is not None and (needed := _cpus_for_memory(job, partition, group)) > available:
        per_cpu = f"at {partition.max_mem_per_cpu} per CPU"
        unmet["cpus"] = _Need(f"{job.describe_option(memory[0])} = {needed} CPUs {per_cpu}", f"{available}{limited}")
    if memory is not None and group.mem_bytes is not None and memory[1] > group.mem_bytes:
        times = {"mem": "", "mem_per_cpu": f" x {cpus} CPUs", "mem_per_gpu": f" x {job.gpus_per_node} GPUs"}
        unmet["mem"] = _Need(job.describe_option(memory[0]) + times[memory[0]], str(group.mem))
    model = job.gpu_model if job.gpus_per_node else None
    if job.gpus_per_node > group.gpus:
        unmet["gpus"] = _Need(_gpus(job), str(group.gpus))
    elif model and group.gpu_models:
        most = next((count for name, count in group.gpu_counts.items() if name.lower() == model.lower()), 0)
        if job.gpus_per_node > most:
            unmet["gpus"] = _Need(_gpus(job), ", ".join(group.gpu_models))
    elif model and group.gpu_model and model.lower() != group.gpu_model.lower():
        unmet["gpus"] = _Need(_gpus(job), f"{group.gpus} x {group.gpu_model}")
    if requested.constraint and group.features is not None and not _satisfies(requested.constraint, group.features):
        unmet["constraint"] = _Need(job.describe_option("constraint"), ",".join(group.features) or "no features")
    return unmet


def _gpus(job: Job) -> str:
    model = f"{job.gpu_model}:" if job.gpu_model and "gpu_model" in job.sources else ""
    return f"gpus_per_node={model}{job.gpus_per_node} ({job.sources.get('gpus_per_node', 'default')})"


def _satisfies(constraint: str, features: Sequence[str]) -> bool:
    """Whether a node of these features may run the job; Slurm decides about ``&`` and ``|``."""
    if not _SIMPLE_CONSTRAINT.match(constraint):
        return True
    result, operator = True, "&"
    for token in re.split(r"([&|,])", constraint):
        if token in ("&", "|", ","):
            operator = token
        else:
            result = result or token in features if operator == "|" else result and token in features
    return result


def _shape_problems(name: str, partition: Partition, unmet: Sequence[dict[str, _Need]]) -> Iterator[str]:
    """One line for each need that no node meets; if each is met somewhere, one for all of them together."""
    everywhere = [kind for kind in unmet[0] if all(kind in needs for needs in unmet)]
    for kind in everywhere:
        most = list(dict.fromkeys(needs[kind].most for needs in unmet))
        yield f"{unmet[0][kind].text}: a node of partition {name} has {' or '.join(most)}"
    if not everywhere:
        texts = dict.fromkeys(need.text for needs in unmet for need in needs.values())
        yield f"{' with '.join(texts)}: no node of partition {name} has all of this (its nodes: {_nodes(partition)})"


def _nodes(partition: Partition) -> str:
    return "; ".join(f"{group.count} x {_shape(group)}" for group in partition.groups)


def _shape(group: NodeGroup) -> str:
    memory = f", {human_bytes(group.mem_bytes)}" if group.mem_bytes else ""
    models = ",".join(group.gpu_models) or group.gpu_model
    gpus = f", {format_count(group.gpus, 'GPU')}{f' {models}' if models else ''}" if group.gpus else ""
    features = f", {','.join(group.features)}" if group.features else ""
    return f"({format_count(group.cpus, 'CPU')}{memory}{gpus}{features})"


class DoesNotFitError(RequestError):
    """No partition of the site takes the job."""


def check_limits(job: Job, site: Site, partitions: Mapping[str, Partition]) -> None:
    """Compare ``job`` with ``partitions`` (one match is enough) and with its QOS.

    Raises DoesNotFitError: one line per limit exceeded, each with the option, where it was read, the limit, and the
    file of the limit.
    """
    problems = [*_request_problems(job), *_license_problems(job, site)]
    if job.kind.takes_sbatch_options:
        problems += _missing(job, site.required, f"site {site.name}")
    unfit = [_problems_in(job, site, name, partition) for name, partition in partitions.items()]
    if not unfit:
        problems += _qos_problems(job, site, None, None)
    elif all(unfit):
        problems += dict.fromkeys(line for lines in unfit for line in lines)
    if problems:
        where = f"site {site.name} ({site.path})"
        raise DoesNotFitError(
            f"the job does not fit {where}:\n" + "\n".join(f"  {p}" for p in problems),
            hint=_where_it_fits(job, site, partitions) if unfit and all(unfit) else None,
        )


def _problems_in(job: Job, site: Site, name: str, partition: Partition) -> list[str]:
    return [
        *_qos_problems(job, site, name, partition),
        *_missing(job, partition.required, f"partition {name}"),
        *partition_problems(job, name, partition),
    ]


def _where_it_fits(job: Job, site: Site, partitions: Mapping[str, Partition]) -> str | None:
    """Suggest options that admit the job: other partitions, or a QOS with a longer limit."""
    others = {name: partition for name, partition in site.partitions.items() if name not in partitions}
    fitting = [name for name, partition in others.items() if not _problems_in(job, site, name, partition)]
    if fitting:
        return f"takes it: {', '.join(f'-p {name}' for name in fitting)}"
    for qos in site.qos:
        changed = replace(job, resources=replace(job.resources, qos=qos))
        if any(not _problems_in(changed, site, name, partition) for name, partition in partitions.items()):
            return f"takes it: --qos {qos}"
    return None


def _request_problems(job: Job) -> Iterator[str]:
    if not job.kind.has_nodes:
        yield from _host_problems(job)
    limit_s = job.time_limit_s
    if job.signal_before_s and limit_s is not None and job.signal_before_s >= limit_s:
        source = job.sources.get("signal_before", "site")
        yield f"signal_before={job.signal_before_s} s ({source}): no shorter than {job.describe_option('time')}"
    if job.retries is not None and job.launcher == "horovodrun":
        option = f"retries={job.retries} ({job.sources.get('retries', 'site')})"
        yield f"{option}: launcher horovodrun cannot tell its ranks to save; horovod-gloo and mpirun can"
    if job.resources.array:
        try:
            check_array(job.resources.array)
        except ValueError as error:
            yield f"{job.describe_option('array')}: {error}"
    if len([m for m in (job.resources.mem, job.resources.mem_per_cpu, job.resources.mem_per_gpu) if m]) > 1:
        yield "mem, mem_per_cpu and mem_per_gpu exclude each other; null clears one set by the site"
    if job.resources.clusters:
        yield (
            f"{job.describe_option('clusters')}: ps, wait and cancel would ask another cluster about the job;"
            " give that cluster a site with its slurm_conf, or set SLURM_CLUSTERS for every command"
        )
    if job.spare and job.max_nodes is not None:
        yield f"{job.describe_option('nodes')}: spare={job.spare} is chosen from a number of nodes, not from a range"
    if job.gpu_request == "none" and job.gpus_per_node:
        yield f"{job.describe_option('gpus_per_node')}: this site takes no GPU request (gpu_request: none)"


def _missing(job: Job, required: Sequence[str], where: str) -> Iterator[str]:
    for field in required:
        if getattr(job.resources, field) is None:
            option = field.replace("_", "-")
            yield f"{field}: {where} needs one: use --{option}, or name it in defaults of the site file"


def _license_problems(job: Job, site: Site) -> Iterator[str]:
    """Licences as ``a:2,b`` or ``a:2|b`` asks for them; each of several alternatives must exist."""
    if not site.licenses or not job.resources.licenses or not job.kind.takes_sbatch_options:
        return
    for part in re.split(r"[,;|]", job.resources.licenses):
        name, count = re.fullmatch(r"(.*?)(?:[:*](\d+))?", part.strip(), re.S).groups()  # type: ignore[union-attr]
        if name not in site.licenses:
            yield f"{job.describe_option('licenses')}: no licence {name!r}; {nearest(name, site.licenses)}"
        elif int(count or 1) > site.licenses[name]:
            yield f"{job.describe_option('licenses')}: there are {site.licenses[name]} of {name}"


def _host_problems(job: Job) -> Iterator[str]:
    """Without a scheduler there is this machine, and the hosts named, which mpirun and horovodrun reach by ssh."""
    if job.nodes > max(1, len(job.hosts)):
        named = (
            f"names {len(job.hosts)} hosts"
            if job.hosts
            else "is one machine; --site names a cluster, nodelist further hosts"
        )
        yield f"{job.describe_option('nodes')}: this site {named}"
    if job.hosts and job.launcher not in ("mpirun", "horovodrun"):
        nodelist = job.describe_option("nodelist")
        yield f"{nodelist}: launcher {job.launcher} starts tasks on this machine only; use mpirun"


def _qos_problems(job: Job, site: Site, name: str | None, partition: Partition | None) -> Iterator[str]:
    """Return the named QOS, or the default one: accepted by the partition, with a limit of this length."""
    # A plugin that may choose the partition of a job that names none may choose its QOS too.
    qos = job.resources.qos or (None if site.chooses_partition else site.default_qos)
    if not qos:
        return
    source = job.describe_option("qos") if job.resources.qos else f"qos: none is named, and the default is {qos}"
    if site.qos and qos not in site.known_qos:
        yield f"{source}: known: {', '.join(sorted(site.known_qos))}"
        return
    if partition is not None and partition.qos is not None and qos not in partition.qos:
        yield f"{source}: partition {name} accepts {', '.join(partition.qos)}"
        return
    longest, requested_s = time_limit_s(site.qos.get(qos) or None), job.time_limit_s
    if job.resources.time and longest is not None and (requested_s is None or requested_s > longest):
        yield f"{job.describe_option('time')}: qos {qos} allows {site.qos[qos]}"


Problem = tuple[str, tuple[str, ...]]
"""A violation, and the key of the policy."""


def add_mandatory(values: Values, site: Site) -> None:
    """Add mandatory requests of the site's policies that the user did not make."""
    for applied in site.policies:
        for field, value in _mandatory(applied.policy).items():
            values.default(field, value, f"policy {applied.path}")


def mandatory_options(job: Job) -> dict[str, object]:
    """Return mandatory requests of the policies of ``job``, by fields of `Resources`."""
    return {field: value for applied in job.policies for field, value in _mandatory(applied.policy).items()}


def with_policies(job: Job) -> Job:
    """``job`` with the policies of today, with which it is compared: every plan of a job goes through here.

    Policies of its cluster, of its site file, and of the files with the policies that applied before.

    Raises RequestError: one line per violated rule, each with the request, its source, and the file and line of the
    rule.
    """
    clusters = (
        find_clusters(job.sbatch, job.slurm_conf) if job.kind.takes_sbatch_options and list_centre_files() else ()
    )
    policies = policies_of_job(job.site, clusters, paths={applied.path for applied in job.policies})
    _refuse("the job", [(applied, problem) for applied in policies for problem in _problems(job, applied)])
    return replace(job, policies=policies)


def check_change(job: Job, changed: Job, policies: Sequence[AppliedPolicy]) -> None:
    """Compare ``changed``, the new version of ``job``, with ``policies``; unchanged values are accepted.

    Raises RequestError: as `with_policies`.
    """
    before = {text for applied in policies for text, _ in _problems(job, applied)}
    after = [(applied, problem) for applied in policies for problem in _problems(changed, applied)]
    _refuse("the change", [(applied, problem) for applied, problem in after if problem[0] not in before])


def _refuse(what: str, problems: Sequence[tuple[AppliedPolicy, Problem]]) -> None:
    if problems:
        places = [where_of(read_file(Path(applied.path)), ("policy", *keys)) for applied, (_, keys) in problems]
        lines = [f"  {text} ({place})" for (_, (text, _)), place in zip(problems, places, strict=True)]
        raise RequestError(
            f"a policy of the centre refuses {what}:\n" + "\n".join(lines),
            hint="what the centre's file says there holds for every site file of this cluster",
        )


def _problems(job: Job, applied: AppliedPolicy) -> Iterator[Problem]:
    policy = applied.policy
    yield from _partition_problems(job, policy)
    yield from _size_problems(job, policy)
    yield from _time_problems(job, policy)
    yield from _account_problems(job, policy)
    for field, value in _mandatory(policy).items():
        if getattr(job.resources, field) != value:
            yield f"{job.describe_option(field)}: must be {value}", ("mandatory", field)


def _partition_problems(job: Job, policy: Policy) -> Iterator[Problem]:
    if policy.partitions is None or not job.kind.has_partitions:
        return
    names = [name for name in (job.resources.partition or "").split(",") if name]
    if not names or not {*names} <= {*policy.partitions}:
        requested = job.describe_option("partition") if names else "no partition is named"
        yield f"{requested}: allowed are {', '.join(policy.partitions)}", ("partitions",)


def _size_problems(job: Job, policy: Policy) -> Iterator[Problem]:
    nodes = job.max_nodes or job.nodes + job.spare
    if policy.max_nodes is not None and nodes > policy.max_nodes:
        yield f"{job.describe_option('nodes')}: at most {format_count(policy.max_nodes, 'node')}", ("max_nodes",)
    if policy.max_gpus is not None:
        for text, count in gpu_counts(job, nodes):
            if count > policy.max_gpus:
                yield f"{text}: {format_count(count, 'GPU')} in all, at most {policy.max_gpus}", ("max_gpus",)


def gpu_counts(job: Job, nodes: int) -> Iterator[tuple[str, int]]:
    """Return the number of GPUs by each option that requests them, and the option."""
    resources = job.resources
    per_node = resources.ntasks_per_node if isinstance(resources.ntasks_per_node, int) else job.ntasks_per_node
    tasks = resources.ntasks if isinstance(resources.ntasks, int) else nodes * per_node
    factors = {"gpus": 1, "gpus_per_node": nodes, "gpus_per_task": tasks}
    for field in GPU_FIELDS:
        if isinstance(value := getattr(resources, field), int | str):
            yield job.describe_option(field), gpus_and_model(value, field)[0] * factors[field]
    if isinstance(share := resources.ntasks_per_gpu, int):
        yield job.describe_option("ntasks_per_gpu"), -(-tasks // share)


def _time_problems(job: Job, policy: Policy) -> Iterator[Problem]:
    longest = time_limit_s(policy.max_time)
    if longest is not None and (job.time_limit_s is None or job.time_limit_s > longest):
        requested = job.describe_option("time") if job.resources.time else "no time limit is requested"
        yield f"{requested}: at most {policy.max_time}", ("max_time",)


def _account_problems(job: Job, policy: Policy) -> Iterator[Problem]:
    account = job.resources.account
    if policy.account_required and not account:
        yield "no account is named: use --account NAME", ("account_required",)
    if policy.accounts is not None and account and account not in policy.accounts:
        yield f"{job.describe_option('account')}: allowed are {', '.join(policy.accounts)}", ("accounts",)


def _mandatory(policy: Policy) -> dict[str, object]:
    values = {field: getattr(policy.mandatory, field) for field in FIELDS}
    return {field: value for field, value in values.items() if value is not UNSET and value is not None}
