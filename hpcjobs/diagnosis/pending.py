"""Explains why a job waits: the reason in words, the jobs ahead of it, and what would start sooner."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import msgspec

from hpcjobs.diagnosis.placement import Placement
from hpcjobs.diagnosis.reasons import Reason, explain_reason
from hpcjobs.diagnosis.sooner import find_sooner, find_sooner_foreign
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.scheduler.slurm.fields import read_clock_s, read_count, read_shown, read_time
from hpcjobs.scheduler.slurm.table import QUESTION, SEPARATOR
from hpcjobs.units import slurm_time

_COLUMNS = ("%i", "%T", "%Q", "%u", "%D", "%L", "%P")


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
    start_estimate: float | None
    waiting_before: tuple[Ahead, ...]
    """Jobs with a higher priority, the next one to start first."""
    running: tuple[Ahead, ...]
    """Jobs that run in the partition, the next one to end first."""
    awaited: tuple[Awaited, ...]
    sooner: tuple[Placement, ...]
    """What would start sooner, by start and cost."""
    fix: tuple[str, ...]


def explain_pending(
    record: JobRecord, *, entry: Entry | None = None, slurm_conf: str | None = None, runner: Runner = run
) -> Pending:
    """Why the job of ``record`` waits; ``entry`` for one that hpcjobs submitted, of which it knows the request."""
    reason = explain_reason(record.reason)
    env = {**QUESTION} | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})
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
        waiting_before=tuple(sorted(waiting, key=lambda job: -(job.priority or 0))),
        running=tuple(sorted(running, key=lambda job: job.time_left_s or 0.0)),
        awaited=tuple(_read_dependencies(shown.get("Dependency", ""), env, runner)),
        sooner=tuple(sooner),
        fix=tuple(fix),
    )


def _with_maintenance(reason: Reason, env: dict[str, str], runner: Runner) -> Reason:
    """The reason with the next maintenance, where one is to come, and the longest time limit that ends before it."""
    answer = runner(["scontrol", "--oneliner", "show", "reservation"], env=env)
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
    return f"--partition {row.partition} --nodes {row.nodes} --time {row.time}"


def _show(job_id: str, env: dict[str, str], runner: Runner) -> dict[str, str]:
    answer = runner(["scontrol", "--all", "--oneliner", "show", "job", job_id], env=env)
    line = answer.out.splitlines()[0] if answer.code == 0 and answer.out else ""
    return read_shown(line)


def _queue(partition: str | None, env: dict[str, str], runner: Runner) -> Iterator[Ahead]:
    """Jobs of the partition that may be seen: sites can hide those of other users."""
    argv = ["squeue", "--all", "--noheader", "--states=PENDING,RUNNING", f"--format={SEPARATOR.join(_COLUMNS)}"]
    answer = runner([*argv, f"--partition={partition}"] if partition else argv, env=env)
    for line in answer.out.splitlines() if answer.code == 0 else ():
        row = [value.strip() for value in line.split(SEPARATOR)]
        if len(row) == len(_COLUMNS):
            job_id, state, priority, user, nodes, left, _ = row
            yield Ahead(job_id, state, user, read_count(nodes), read_count(priority), read_clock_s(left))


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
