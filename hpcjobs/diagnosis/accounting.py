"""Asks Slurm for what a job's record lacks: steps with their memory, limits, who cancelled the job, its log."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcjobs.diagnosis.values import StepRecord
from hpcjobs.processes.programs import Runner, run
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm import fields
from hpcjobs.scheduler.slurm.parse import accounted_reason, parse_scontrol
from hpcjobs.scheduler.slurm.table import SHOW_JOB, Table, TableRow

_TABLE = Table(
    (
        *("JobID", "JobName", "State", "Reason", "Partition", "ExitCode", "NodeList", "NNodes", "Start", "ElapsedRaw"),
        *(
            "TimelimitRaw",
            "ReqMem",
            "ReqCPUS",
            "MaxRSS",
            "MaxRSSNode",
            "MaxRSSTask",
            "User",
            "WorkDir",
            "Submit",
            "End",
        ),
    )
)
_NEAR_LIMIT = 0.95
"""A task that used so much of its node's memory reached the limit: it is sampled every few seconds only."""
_BAD_NODE = re.compile(r"DOWN|FAIL|NOT_RESPONDING|DRAIN")


_TASK = r"[_+]\d+"
"""What stands behind the id of an array or of a heterogeneous job for one of its tasks or components."""


class Account(NamedTuple):
    """One job by sacct or scontrol; None: not known."""

    job_id: str
    """Of an array or heterogeneous job, that of the task or component that it describes."""
    source: str
    name: str | None
    state: State
    reason: str | None
    partition: str | None
    exit_code: int | None
    signal: int | None
    nodes: tuple[str, ...]
    started: float | None
    elapsed_s: float | None
    time_limit_s: float | None
    mem_per_node_bytes: int | None
    cancelled_by: str | None
    work_dir: str | None
    logs: tuple[str, ...]
    """The files of standard output and error, where scontrol names them."""
    out_of_memory: StepRecord | None


def read_account(
    job_id: str, *, env: dict[str, str], runner: Runner = run, is_meant: Callable[[JobRecord], bool] = lambda _: True
) -> Account | None:
    """What sacct knows of ``job_id``, or scontrol where the accounting does not answer; None: neither knows it.

    Of an array or heterogeneous job that is the first task or component that failed, else the first one.

    Args:
        is_meant: whether a record with this id is about the job; a cluster may have given the id out before or since.

    Raises:
        CommandMissingError: Slurm's commands are not on PATH.
    """
    all_shown = {each.job_id: each for each in _read_scontrol(job_id, is_meant, env=env, runner=runner)}
    answer = runner(_TABLE.sacct("--duplicates", f"--jobs={job_id}"), env=env)
    all_accounted = _from_sacct(job_id, list(_TABLE.rows(answer.out)) if answer.code == 0 else [], is_meant)
    known = sorted([*all_shown.values(), *all_accounted.values()], key=lambda each: _number(each.job_id))
    if not known:
        return None
    chosen = next(filter(_has_failed, known), known[0]).job_id
    accounted, shown = all_accounted.get(chosen), all_shown.get(chosen)
    if accounted is None or shown is None:
        return accounted or shown
    account = accounted._replace(logs=shown.logs, work_dir=shown.work_dir or accounted.work_dir)
    if accounted.state.ended:
        return account
    # The accounting lags behind a job that has just ended, and keeps no reason of one that waits (Slurm 24.11).
    return account._replace(state=shown.state, reason=shown.reason)


def _has_failed(account: Account) -> bool:
    return account.state.ended and account.state is not State.COMPLETED


def _number(job_id: str) -> int:
    """The index of an array task or of a component."""
    return int(re.split(r"[_+]", job_id)[-1])


def failed_nodes(account: Account, *, env: dict[str, str], runner: Runner = run) -> tuple[str, ...]:
    """Nodes of a job that failed, by the accounting's events; those that are down or drained now, where it has
    none."""
    names = ",".join(account.nodes)
    if not names:
        return ()
    if account.started is not None:
        # A node may be back in service long before somebody looks.
        events = ["sacctmgr", "--noheader", "--parsable2", "show", "event", f"nodes={names}"]
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(account.started))
        answer = runner([*events, f"start={since}", "format=NodeName,State"], env=env)
        known = [line.partition("|") for line in answer.out.splitlines()] if answer.code == 0 else []
        if down := tuple(dict.fromkeys(node for node, _, state in known if _BAD_NODE.search(state.upper()))):
            return down
    answer = runner(["sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={names}"], env=env)
    rows = (line.split() for line in answer.out.splitlines()) if answer.code == 0 else iter(())
    return tuple(dict.fromkeys(row[0] for row in rows if len(row) == 2 and _BAD_NODE.search(row[1].upper())))


def _from_sacct(job_id: str, rows: list[TableRow], is_meant: Callable[[JobRecord], bool]) -> dict[str, Account]:
    """The job, or its tasks or components, by id."""
    of_job = re.compile(re.escape(job_id) + f"(?:{_TASK})?")
    all_own = ((n, row) for n, row in enumerate(rows) if of_job.fullmatch(row.raw("JobID")))
    last = {row.raw("JobID"): n for n, row in all_own if is_meant(_record(row))}
    return {name: _from_row(name, rows[n], rows[n + 1 :]) for name, n in last.items()}  # the last of several starts


def _record(row: TableRow) -> JobRecord:
    """What tells whose job it is."""
    return JobRecord(
        row.raw("JobID"), row.state(), "sacct", name=row.name("JobName"), user=row.text("User"),
        submitted=row.time("Submit"), started=row.time("Start"), ended=row.time("End"),
    )  # fmt: skip


def _from_row(job_id: str, job: TableRow, behind: Sequence[TableRow]) -> Account:
    steps = list(itertools.takewhile(lambda row: row.raw("JobID").startswith(f"{job_id}."), behind))
    nodes = _hosts(job.text("NodeList"))
    memory = _per_node(job.raw("ReqMem"), len(nodes) or 1, job.count("ReqCPUS") or 0)
    cancelled = re.match(r"CANCELLED by (\d+)", job.raw("State"))
    limit, elapsed = job.count("TimelimitRaw"), job.count("ElapsedRaw")
    code, signal = job.exit()
    return Account(
        job_id=job_id,
        source="sacct",
        name=job.name("JobName"),
        state=job.state(),
        reason=accounted_reason(job),
        partition=job.text("Partition"),
        exit_code=code,
        signal=signal,
        nodes=nodes,
        started=job.time("Start"),
        elapsed_s=None if elapsed is None else float(elapsed),
        time_limit_s=None if limit is None else limit * 60.0,
        mem_per_node_bytes=memory,
        cancelled_by=f"user {cancelled[1]}" if cancelled else None,
        work_dir=job.name("WorkDir"),
        logs=(),
        out_of_memory=_memory_step(steps, memory),
    )


def _memory_step(steps: Iterable[TableRow], limit: int | None) -> StepRecord | None:
    """The step that Slurm calls out of memory, or one that was killed and whose task reached the limit."""
    for step in steps:
        state, rss = step.state(), fields.read_bytes(step.raw("MaxRSS"))
        is_over = limit is not None and rss is not None and rss >= _NEAR_LIMIT * limit
        is_killed = state in (State.CANCELLED, State.FAILED)
        if state is State.OUT_OF_MEMORY or (is_over and is_killed):
            name = step.raw("JobID").partition(".")[2]
            return StepRecord(name, state.value, rss, step.text("MaxRSSNode"), step.count("MaxRSSTask"))
    return None


def _read_scontrol(
    job_id: str, is_meant: Callable[[JobRecord], bool], *, env: dict[str, str], runner: Runner
) -> Iterator[Account]:
    answer = runner([*SHOW_JOB, job_id], env=env)
    shown = [line for line in answer.out.splitlines() if "JobState=" in line] if answer.code == 0 else []
    records = [line for line in shown if all(map(is_meant, parse_scontrol(line)))]
    for record in records:
        job = TableRow(fields.read_shown(record))
        yield _make_account(job_id if len(records) == 1 else _id_of(job), job)


def _id_of(job: TableRow) -> str:
    """As sacct writes it: 12_3 of an array, 24+1 of a heterogeneous job."""
    task = job.raw("ArrayTaskId")
    if task.isdecimal():
        return f"{job.raw('ArrayJobId')}_{task}"
    offset = job.raw("HetJobOffset")
    return f"{job.raw('HetJobId')}+{offset}" if offset.isdecimal() else job.raw("JobId")


def _make_account(job_id: str, job: TableRow) -> Account:
    code, signal = job.exit()
    return Account(
        job_id=job_id,
        source="scontrol",
        name=job.name("JobName"),
        state=job.state("JobState"),
        reason=job.text("Reason"),
        partition=job.text("Partition"),
        exit_code=code,
        signal=signal,
        nodes=_hosts(job.text("NodeList")),
        started=job.time("StartTime"),
        elapsed_s=job.clock_s("RunTime"),
        time_limit_s=job.clock_s("TimeLimit"),
        mem_per_node_bytes=fields.read_bytes(job.raw("MinMemoryNode")),
        cancelled_by=None,
        work_dir=job.name("WorkDir"),
        logs=tuple(dict.fromkeys(filter(None, (job.name("StdOut"), job.name("StdErr"))))),
        out_of_memory=None,
    )


def _hosts(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(hosts_of(text))


def _per_node(text: str, nodes: int, cpus: int) -> int | None:
    """Bytes per node of sacct's ReqMem: ``4Gn`` per node, ``2Gc`` per CPU, since Slurm 21.08 ``8G`` of the job."""
    size = fields.read_bytes(text.rstrip("nc"))
    if not size:
        return None
    if text.endswith("n"):
        return size
    return size * cpus // nodes if text.endswith("c") else size // nodes
