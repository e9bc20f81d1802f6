"""The centre's policies, for a job: what it must request, and what it may not exceed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from hpcjobs.errors import RequestError
from hpcjobs.job.fault_tolerance import named_nodes
from hpcjobs.job.layers import Values
from hpcjobs.job.models import Job
from hpcjobs.site.centre import find_clusters, policies_of_job
from hpcjobs.site.models import Site
from hpcjobs.site.policy import AppliedPolicy, Policy
from hpcjobs.site.resources import FIELDS, GPU_FIELDS, gpus_and_model
from hpcjobs.site.search import list_centre_files
from hpcjobs.units import format_count, time_limit_s

_SHARED = (None, False, "user", "mcs")
"""Values of ``exclusive`` with which a job does not get all GPUs of its nodes."""

Problem = tuple[str, tuple[str, ...]]
"""What is wrong, and the key of the policy that says so."""


def add_mandatory(values: Values, site: Site) -> None:
    """Request what the policies of ``site`` make mandatory and nobody has requested."""
    for applied in site.policies:
        for field, value in _mandatory(applied.policy).items():
            values.default(field, value, f"policy {applied.path}")


def mandatory_options(job: Job) -> dict[str, object]:
    """What the policies of ``job`` make mandatory, by fields of `Resources`."""
    return {field: value for applied in job.policies for field, value in _mandatory(applied.policy).items()}


def with_policies(job: Job) -> Job:
    """``job`` with the policies of today, with which it is compared: every plan of a job goes through here.

    They are those of its cluster and its site file, and of the files whose policy it came under before.

    Raises:
        RequestError: one line per rule that is broken, each with what was requested, where that was said, and the file
            and line of the rule.
    """
    clusters = find_clusters(job.sbatch, job.slurm_conf) if job.scheduler == "slurm" and list_centre_files() else ()
    policies = policies_of_job(job.site, clusters, paths={applied.path for applied in job.policies})
    _refuse("the job", [(applied, problem) for applied in policies for problem in _problems(job, applied)])
    return replace(job, policies=policies)


def check_change(job: Job, changed: Job, policies: Sequence[AppliedPolicy]) -> None:
    """Compare ``changed``, which ``job`` is to become, with ``policies``; what was the same before is not its fault.

    Raises:
        RequestError: as `with_policies`.
    """
    before = {text for applied in policies for text, _ in _problems(job, applied)}
    after = [(applied, problem) for applied in policies for problem in _problems(changed, applied)]
    _refuse("the change", [(applied, problem) for applied, problem in after if problem[0] not in before])


def _refuse(what: str, problems: Sequence[tuple[AppliedPolicy, Problem]]) -> None:
    if problems:
        lines = [f"  {text} ({_locate(applied, keys)})" for applied, (text, keys) in problems]
        raise RequestError(
            f"a policy of the centre refuses {what}:\n" + "\n".join(lines),
            hint="what the centre's file says there holds for every site file of this cluster",
        )


def _locate(applied: AppliedPolicy, keys: tuple[str, ...]) -> str:
    from hpcjobs.site.inheritance import where_of
    from hpcjobs.site.yaml_file import read_file

    return where_of(read_file(Path(applied.path)), ("policy", *keys))


def _problems(job: Job, applied: AppliedPolicy) -> Iterator[Problem]:
    policy = applied.policy
    yield from _partition_problems(job, policy)
    yield from _size_problems(job, applied)
    yield from _time_problems(job, policy)
    yield from _account_problems(job, policy)
    for field, value in _mandatory(policy).items():
        if getattr(job.resources, field) != value:
            yield f"{job.describe_option(field)}: must be {value}", ("mandatory", field)


def _partition_problems(job: Job, policy: Policy) -> Iterator[Problem]:
    if policy.partitions is None or job.scheduler == "local":
        return
    names = [name for name in (job.resources.partition or "").split(",") if name]
    if not names or not {*names} <= {*policy.partitions}:
        requested = job.describe_option("partition") if names else "no partition is named"
        yield f"{requested}: allowed are {', '.join(policy.partitions)}", ("partitions",)


def _size_problems(job: Job, applied: AppliedPolicy) -> Iterator[Problem]:
    policy = applied.policy
    resources = job.resources
    nodes = job.max_nodes or job.nodes + job.spare
    name = "nodes" if resources.nodes else "ntasks"
    if not resources.nodes and isinstance(resources.ntasks, int):
        nodes = max(nodes, resources.ntasks)  # Slurm may give each task a node of its own
    nodelist = resources.nodelist if isinstance(resources.nodelist, str) and job.scheduler == "slurm" else None
    if len(named := named_nodes(nodelist)) > nodes:  # a batch script's job has all of them
        nodes, name = len(named), "nodelist"
    if policy.max_nodes is not None and nodes > policy.max_nodes:
        yield f"{job.describe_option(name)}: at most {format_count(policy.max_nodes, 'node')}", ("max_nodes",)
    if policy.max_gpus is not None:
        for text, count in gpu_counts(job, applied, nodes):
            if count > policy.max_gpus:
                yield f"{text}: {format_count(count, 'GPU')} in all, at most {policy.max_gpus}", ("max_gpus",)


def gpu_counts(job: Job, applied: AppliedPolicy, nodes: int) -> Iterator[tuple[str, int]]:
    """How many GPUs the job has by each option that says so, and the option."""
    resources = job.resources
    per_node = resources.ntasks_per_node if isinstance(resources.ntasks_per_node, int) else job.ntasks_per_node
    tasks = resources.ntasks if isinstance(resources.ntasks, int) else nodes * per_node
    factors = {"gpus": 1, "gpus_per_node": nodes, "gpus_per_task": tasks}
    for field in GPU_FIELDS:
        if isinstance(value := getattr(resources, field), int | str):
            yield job.describe_option(field), gpus_and_model(value, field)[0] * factors[field]
    if isinstance(share := resources.ntasks_per_gpu, int):
        yield job.describe_option("ntasks_per_gpu"), -(-tasks // share)
    if job.scheduler == "local":
        return
    names = (resources.partition or "").split(",") if isinstance(resources.partition, str) else [""]
    if resources.exclusive not in _SHARED:
        whole_nodes = f"{job.describe_option('exclusive')}: a job has all GPUs of its nodes"
    elif {*names} & {*applied.exclusive}:
        whole_nodes = f"{job.describe_option('partition')}: a job has all GPUs of its nodes"
    else:
        return
    most = max(applied.gpus_of_nodes.values(), default=0)
    yield whole_nodes, nodes * max(applied.gpus_of_nodes.get(name, most) for name in names)


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
