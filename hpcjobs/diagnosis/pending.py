"""Explains why a job waits, and which changes would start it sooner."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import msgspec

from hpcjobs import slurm_commands
from hpcjobs.diagnosis.placement import Cost, Placement, explain_late_start, place
from hpcjobs.diagnosis.reasons import Reason, explain_reason
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.job.limits import with_policies
from hpcjobs.job.models import Job, JobSpec
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.index import Entry
from hpcjobs.run.rerun import read_manifest, resolve_again
from hpcjobs.run.select import is_own
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.scheduler.slurm.job_queries import ask_sbatch
from hpcjobs.scheduler.slurm.parse import Table, read_clock_s, read_count, read_shown, read_time
from hpcjobs.site.checks import Moment
from hpcjobs.site.library import load_site
from hpcjobs.site.resources import FIELDS, Resources
from hpcjobs.units import slurm_time

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
        job = read_manifest(Path(entry.run_dir)).job
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
    reason = explain_reason(record.reason)
    env = slurm_commands.question_env(slurm_conf)
    if (record.reason or "").startswith(("ReqNodeNotAvail", "(ReqNodeNotAvail")):
        reason = _with_maintenance(reason, env, runner)
    job_id = record.job_id.split("_")[0]
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
    other = job.job_id.split("_")[0]
    if other == job_id or job.priority is None or priority is None:
        return False
    return (job.priority, -int(other)) > (priority, -int(job_id))


def _read_dependencies(text: str, env: dict[str, str], runner: Runner) -> Iterator[Awaited]:
    """``afterok:12(unfulfilled),afterany:13`` -> the jobs, with their states."""
    for condition, ids in re.findall(r"(after\w*|singleton):?((?:_?\d[\d_*+]*(?:\(\w+\))?:?)*)", text):
        for job_id in re.findall(r"(\d+(?:_[\d*]+)?)", re.sub(r"\(\w+\)", "", ids)):
            shown = _show(job_id.split("_")[0], env, runner)
            yield Awaited(job_id, condition, shown.get("JobState"))
