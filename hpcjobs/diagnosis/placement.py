"""Finds placements of a program over sites and partitions (validity, start, cost), and explains why a job waits."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec

from hpcjobs import slurm_commands
from hpcjobs.diagnosis.reasons import Reason, explain_reason, split_reasons
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.job.limits import with_policies
from hpcjobs.job.models import Job, JobSpec, Layer
from hpcjobs.job.plan import resolve_request
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_job_manifest
from hpcjobs.run.rerun import resolve_again
from hpcjobs.run.select import is_own
from hpcjobs.scheduler.base import Estimate, JobRecord, connect
from hpcjobs.scheduler.slurm.estimates import ask_sbatch, count_idle_nodes
from hpcjobs.scheduler.slurm.parse import Table, read_clock_s, read_count, read_shown, read_time
from hpcjobs.site.checks import Moment
from hpcjobs.site.library import find_default_site, load_site
from hpcjobs.site.machine import cluster_name
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.resources import FIELDS, Resources
from hpcjobs.slurm_commands import cluster_env
from hpcjobs.units import parent_id, slurm_time

_SOON_S = 600.0
"""An estimate within this time is not explained: Slurm's own scheduling takes minutes."""


class Cost(msgspec.Struct, frozen=True):
    """Cost of a job that runs until its time limit; ``amount`` None: the site file has no prices."""

    node_hours: float
    amount: float | None = None
    currency: str | None = None
    per_attempt: bool = False
    """The job has ``--retries``: the cost holds for each attempt."""


def estimate_cost(job: Job, site: Site) -> Cost | None:
    """Largest cost of ``job``, by the site's prices; None: it has no time limit."""
    if job.time_limit_s is None:
        return None
    hours = job.time_limit_s / 3600
    nodes = (job.max_nodes or job.nodes) + job.spare
    cpus, gpus = _charged_per_node(job, site)
    prices = site.prices
    rates = [(prices.node_hour, nodes), (prices.cpu_hour, nodes * cpus), (prices.gpu_hour, nodes * gpus)]
    amounts = [rate * count * hours for rate, count in rates if rate is not None]
    return Cost(
        nodes * hours,
        amount=sum(amounts) if amounts else None,
        currency=prices.currency if amounts else None,
        per_attempt=job.retries is not None,
    )


def _charged_per_node(job: Job, site: Site) -> tuple[int, int]:
    """CPUs and GPUs: with ``--exclusive`` Slurm allocates all that a node has, whatever the job requested."""
    partition: Partition | None = site.partitions.get((job.resources.partition or "").split(",")[0])
    if job.resources.exclusive is True and partition is not None:
        return partition.shape.cpus, partition.shape.gpus
    return job.ntasks_per_node * (job.resources.cpus_per_task or 1), job.gpus_per_node


class Placement(msgspec.Struct, frozen=True):
    """One site and partition for a job."""

    site: str
    partition: str | None
    is_valid: bool
    nodes: int | None = None
    time: str | None = None
    start: Moment | None = None
    """Seconds since 1970; None: not known."""
    cost: Cost | None = None
    remark: str | None = None
    """Why it is not valid, or why no start is known."""


def find_placements(request: JobSpec, sites: Iterable[Site], *, spec: Sequence[Layer] | Path = ()) -> list[Placement]:
    """Each partition of each site, best first: by start, then by cost; then those without an estimate."""
    rows = [row for site in sites for row in _on_site(request, site, spec)]
    return sorted(rows, key=_order)


def place(job: Job, site: Site, *, runner: Runner = run) -> Placement:
    """When a job that fits its site would start there, and its cost."""
    estimate, remark = Estimate(), None
    if job.kind.takes_sbatch_options:
        if can_ask(site):
            estimate = connect(job.scheduler, job.slurm_conf, runner=runner).estimate(job)
            without = None if estimate.start or estimate.refusal else "Slurm has no estimate"
            env = cluster_env(job.slurm_conf)
            late = explain_late_start(
                estimate.start, job.nodes + job.spare, job.resources.partition or None, env=env, runner=runner
            )
            remark = "; ".join(filter(None, (*estimate.messages, late or without))) or None
        else:
            remark = "no Slurm of this site answers here"
    else:
        estimate = connect(job.scheduler, job.slurm_conf, runner=runner).estimate(job)
        remark = estimate.refusal
    return Placement(
        site=site.name,
        partition=job.resources.partition or None,
        is_valid=estimate.refusal is None,
        nodes=job.max_nodes or job.nodes,
        time=job.resources.time or None,
        start=estimate.start,
        cost=estimate_cost(job, site),
        remark=f"Slurm refuses it: {estimate.refusal}"
        if estimate.refusal and job.kind.takes_sbatch_options
        else remark,
    )


def explain_late_start(
    start: float | None, nodes: int, partition: str | None, *, env: Mapping[str, str] | None, runner: Runner = run
) -> str | None:
    """Why Slurm's estimate may be too late: ``nodes`` nodes are idle. None: they are not, or the start is soon.

    Slurm counts every job up to its time limit, and looks at waiting jobs in intervals.
    """
    if start is None or start - time.time() < _SOON_S:
        return None
    idle = count_idle_nodes(partition, env=env, runner=runner)
    if idle < nodes:
        return None
    count = "1 node is" if idle == 1 else f"{idle} nodes are"
    return f"{count} idle now: it may start sooner than Slurm's estimate, which counts every job up to its time limit"


def can_ask(site: Site) -> bool:
    """Whether the Slurm of ``site`` answers commands of this machine."""
    if site.rehearsal:
        return True
    if shutil.which("sbatch") is None:
        return False
    if site.slurm_conf:
        return os.path.exists(site.slurm_conf)
    if site.cluster is not None:
        return site.cluster.lower() == cluster_name(os.environ.get("SLURM_CONF"))
    default = find_default_site()
    return default is not None and load_site(default).name == site.name


def _on_site(request: JobSpec, site: Site, spec: Sequence[Layer] | Path) -> Iterator[Placement]:
    named = request.resources.partition
    unnamed: list[str | None] = [None] if site.chooses_partition or not site.kind.has_partitions else [*site.partitions]
    partitions = [named] if isinstance(named, str) else unnamed
    for partition in partitions:
        options = {} if partition is None else {"partition": partition}
        try:
            job = resolve_request(request, site, spec=spec, **options)
        except RequestError as error:
            lines = [line.strip() for line in error.message.splitlines()]
            yield Placement(site.name, partition, False, remark="; ".join(lines[1:] or lines))
            continue
        yield place(job, site)


def _order(row: Placement) -> tuple[bool, bool, float, float, str]:
    cost = row.cost.node_hours if row.cost is not None else float("inf")
    return not row.is_valid, row.start is None, row.start or 0.0, cost, row.site


SOONER_S = 60.0
"""A start that is less than this sooner is not suggested; of closer starts the cheaper one is better."""
_LARGEST_SEARCH = 24
"""Largest number of alternatives: each is a query to the controller."""
_SHARES = (1.0, 0.5, 0.25)
"""Shares of the time limit."""
_SHORTEST_S = 60


def find_sooner(entry: Entry, start_estimate: float | None, *, runner: Runner = run) -> list[Placement]:
    """Alternatives for a job of hpcjobs that start sooner than it would, by start and cost.

    ``start_estimate`` is Slurm's estimate for the waiting job itself; an equal new job would start later.
    """
    if not is_own(entry):
        return []  # its site file, Python and containers belong to another user
    try:
        job = read_job_manifest(Path(entry.run_dir)).job
        site = load_site(job.site_file)
    except HpcJobsError:
        return []  # without its manifest the request is unknown
    unchanged = place(job, site, runner=runner)
    if unchanged.start is None:
        return []
    rows = []
    partitions = [] if site.chooses_partition else list(site.partitions)
    for changes in list(_alternatives(job, partitions))[:_LARGEST_SEARCH]:
        try:
            other = with_policies(resolve_again(job, entry, changes))
        except RequestError:
            continue  # it does not fit that partition
        rows.append(place(other, site, runner=runner))
    return _sooner(rows, min(unchanged.start, start_estimate or unchanged.start))


def find_sooner_foreign(
    shown: Mapping[str, str], start_estimate: float | None, *, slurm_conf: str | None = None, runner: Runner = run
) -> list[Placement]:
    """The same for a job that was submitted by other means, from the output of `scontrol show job`."""
    nodes, limit_s = read_count(shown.get("NumNodes", "").partition("-")[0]), read_clock_s(shown.get("TimeLimit"))
    own, tasks = shown.get("Partition"), read_count(shown.get("NumTasks", ""))
    if nodes is None or limit_s is None or not own:
        return []
    given = {field: value for field, value in shown.items() if value not in ("", "(null)", "N/A", "0")}
    same = [f"--{row.name}={given[row.shown]}" for row in FIELDS.values() if row.shown in given]

    def ask(partition: str, count: int, seconds: int) -> Placement:
        share = [] if tasks is None else [f"--ntasks={max(count, tasks * count // nodes)}"]
        options = [*same, *share, f"--partition={partition}", f"--nodes={count}", f"--time={slurm_time(seconds)}"]
        estimate = ask_sbatch([*options, "--wrap=true"], slurm_conf=slurm_conf, runner=runner)
        cost = Cost(count * seconds / 3600)
        # A plugin of the cluster may choose another partition: then the estimate is not about this one.
        start = estimate.start if estimate.partition in (None, partition) else None
        return Placement("-", partition, estimate.refusal is None, count, slurm_time(seconds), start, cost)

    unchanged = ask(own, nodes, int(limit_s))
    if unchanged.start is None:
        return []
    answer = runner(slurm_commands.list_partitions(), env=slurm_commands.cluster_env(slurm_conf))
    partitions = [own, *(name for name in dict.fromkeys(answer.out.split()) if name != own)]
    sizes = [nodes, nodes // 2] if nodes > 1 else [nodes]
    choices = list(product(sizes, _SHARES, partitions))[1 : _LARGEST_SEARCH + 1]  # the first one is the unchanged job
    rows = [ask(name, count, max(_SHORTEST_S, int(limit_s * share))) for count, share, name in choices]
    return _sooner(rows, min(unchanged.start, start_estimate or unchanged.start))


def _sooner(rows: list[Placement], start: float) -> list[Placement]:
    best = [(row.start, row) for row in rows if row.start is not None and row.start < start - SOONER_S]
    first = min((when for when, _ in best), default=start)

    def rank(choice: tuple[float, Placement]) -> tuple[float, float]:
        when, row = choice
        return ((when - first) // SOONER_S, row.cost.node_hours if row.cost else 0.0)

    return [row for _, row in sorted(best, key=rank)]


def _alternatives(job: Job, partitions: list[str]) -> Iterator[JobSpec]:
    """Each partition (also the job's own, or none), with shares of the time limit and half the nodes; the smallest
    change comes first."""
    own = job.resources.partition or None
    names = [own, *(name for name in partitions if name != own)]
    sizes = [job.nodes, job.nodes // 2] if job.nodes > 1 and job.max_nodes is None else [job.nodes]
    for size, share, partition in product(sizes, _SHARES, names):
        stated: dict[str, object] = {}
        if partition != own:
            stated["partition"] = partition
        if share != 1.0 and job.time_limit_s is not None:
            stated["time"] = slurm_time(max(_SHORTEST_S, int(job.time_limit_s * share)))
        if size != job.nodes:
            stated["nodes"] = size
        if stated:
            yield JobSpec(resources=msgspec.convert(stated, Resources))


_QUEUE = Table(("JobID", "State", "Priority", "User", "NNodes", "TimeLeft", "Partition"))


class Ahead(msgspec.Struct, frozen=True):
    """Another job of the partition: one that runs, or one that waits with a higher priority."""

    job_id: str
    state: str
    user: str
    nodes: int | None
    priority: int | None
    time_left_s: float | None


class Awaited(msgspec.Struct, frozen=True):
    """A job that this one depends on."""

    job_id: str
    condition: str
    state: str | None


class Pending(msgspec.Struct, frozen=True):
    """Why a job waits. Times are seconds since 1970."""

    job_id: str
    name: str | None
    state: str
    reason: str | None
    text: str
    start_estimate: Moment | None
    start_remark: str | None
    """Why the start may be another one."""
    waiting_before: tuple[Ahead, ...]
    """Jobs with a higher priority, the next one to start first."""
    running: tuple[Ahead, ...]
    """Jobs that run in the partition, the next one to end first."""
    awaited: tuple[Awaited, ...]
    sooner: tuple[Placement, ...]
    """Placements that would start sooner, by start and cost."""
    fix: tuple[str, ...]


def explain_pending(
    record: JobRecord, *, entry: Entry | None = None, slurm_conf: str | None = None, runner: Runner = run
) -> Pending:
    """Explain why the job of ``record`` waits; with ``entry``, the request is known too."""
    env = slurm_commands.question_env(slurm_conf)
    if entry is not None and entry.task is not None and len(split_reasons(record.reason)) > 1:
        own = _show(f"{parent_id(record.job_id)}_{entry.task}", env, runner)
        record = msgspec.structs.replace(record, reason=own.get("Reason", record.reason))
    reason = explain_reason(record.reason)
    if (record.reason or "").startswith(("ReqNodeNotAvail", "(ReqNodeNotAvail")):
        reason = _with_maintenance(reason, env, runner)
    job_id = parent_id(record.job_id)
    shown = _show(job_id, env, runner)
    queue = list(_queue(record.partition, env, runner)) if reason.may_move else []
    priority = read_count(shown.get("Priority", ""))
    waiting = [job for job in queue if job.state == "PENDING" and _is_before(job, priority, job_id)]
    running = [job for job in queue if job.state == "RUNNING"]
    advice = reason.fix
    if advice is not None and entry is None and advice.startswith("hpcjobs "):  # `rerun` has no request of such a job
        advice = "scancel {job} && sbatch SCRIPT  # without what cannot be fulfilled"
    sooner, fix = [], [advice.replace("{job}", job_id)] if advice else []
    if reason.may_move and entry is not None:
        sooner = find_sooner(entry, record.start_estimate, runner=runner)
        fix += [f"hpcjobs cancel {job_id} && hpcjobs rerun {job_id} {_options(row)}" for row in sooner[:1]]
    elif reason.may_move:
        sooner = find_sooner_foreign(shown, record.start_estimate, slurm_conf=slurm_conf, runner=runner)
        fix += [f"scancel {job_id} && sbatch {_options(row)} SCRIPT" for row in sooner[:1]]
    return Pending(
        job_id=record.job_id,
        name=record.name,
        state=record.state.value,
        reason=record.reason,
        text=reason.text,
        start_estimate=record.start_estimate,
        start_remark=_remark_on_start(record, shown, env, runner),
        waiting_before=tuple(sorted(waiting, key=lambda job: -(job.priority or 0))),
        running=tuple(sorted(running, key=lambda job: job.time_left_s or 0.0)),
        awaited=tuple(_read_dependencies(shown.get("Dependency", ""), env, runner)),
        sooner=tuple(sooner),
        fix=tuple(fix),
    )


def _remark_on_start(record: JobRecord, shown: Mapping[str, str], env: dict[str, str], runner: Runner) -> str | None:
    nodes = read_count(shown.get("NumNodes", "").partition("-")[0])
    if nodes is None:
        return None
    return explain_late_start(record.start_estimate, nodes, record.partition, env=env, runner=runner)


def _with_maintenance(reason: Reason, env: dict[str, str], runner: Runner) -> Reason:
    """The reason with the next maintenance, where one is to come, and the longest time limit that ends before it."""
    answer = runner(slurm_commands.show_reservations(), env=env)
    shown = [read_shown(line) for line in answer.out.splitlines()] if answer.code == 0 else []
    begins = {
        begin: each.get("ReservationName", "")
        for each in shown
        if "MAINT" in each.get("Flags", "") and (begin := read_time(each.get("StartTime", ""))) is not None
    }
    coming = [begin for begin in begins if begin > time.time()]
    if not coming:
        return reason
    begin = min(coming)
    left = slurm_time(max(0, int(begin - time.time()) // 60 * 60 - 60))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(begin))
    return Reason(
        f"The nodes are reserved for the maintenance {begins[begin]}: it begins at {when}, before the job's limit ends",
        f"scontrol update JobId={{job}} TimeLimit={left}  # less than what is left; longer jobs wait for its end",
        may_move=True,
    )


def _options(row: Placement) -> str:
    partition = "" if row.partition is None else f"--partition {row.partition} "
    return f"{partition}--nodes {row.nodes} --time {row.time}"


def _show(job_id: str, env: dict[str, str], runner: Runner) -> dict[str, str]:
    answer = runner(slurm_commands.show_job(job_id), env=env)
    line = answer.out.splitlines()[0] if answer.code == 0 and answer.out else ""
    return read_shown(line)


def _queue(partition: str | None, env: dict[str, str], runner: Runner) -> Iterator[Ahead]:
    """Visible jobs of the partition: sites can hide jobs of other users."""
    argv = slurm_commands.list_queue(*_QUEUE, states=("PENDING", "RUNNING"), partition=partition)
    answer = runner(argv, env=env)
    for row in _QUEUE.rows(answer.out) if answer.code == 0 else ():
        yield Ahead(
            row.raw("JobID"),
            row.raw("State"),
            row.raw("User"),
            nodes=row.count("NNodes"),
            priority=row.count("Priority"),
            time_left_s=row.clock_s("TimeLeft"),
        )


def _is_before(job: Ahead, priority: int | None, job_id: str) -> bool:
    """Whether it has a higher priority, or the same one and an older id."""
    other = parent_id(job.job_id)
    if other == job_id or job.priority is None or priority is None:
        return False
    return (job.priority, -int(other)) > (priority, -int(job_id))


def _read_dependencies(text: str, env: dict[str, str], runner: Runner) -> Iterator[Awaited]:
    """``afterok:12(unfulfilled),afterany:13`` -> the jobs, with their states."""
    for condition, ids in re.findall(r"(after\w*|singleton):?((?:_?\d[\d_*+]*(?:\(\w+\))?:?)*)", text):
        for job_id in re.findall(r"(\d+(?:_[\d*]+)?)", re.sub(r"\(\w+\)|\+\d+", "", ids)):
            shown = _show(parent_id(job_id), env, runner)
            yield Awaited(job_id, condition, shown.get("JobState"))
