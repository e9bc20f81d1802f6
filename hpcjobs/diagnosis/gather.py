"""Gathers the facts about a job: run folder, accounting, and logs of jobs that others submitted."""

from __future__ import annotations

import glob
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from hpcjobs import slurm_commands
from hpcjobs.diagnosis.log import read_lines
from hpcjobs.diagnosis.values import Failure, JobFacts, LogLine, StepRecord
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, SchedulerError, UnknownJobError, reason_of
from hpcjobs.processes.programs import Runner, run
from hpcjobs.record import BATCH_SCRIPT, STATE
from hpcjobs.record.manifest import RequestedJob
from hpcjobs.record.values import read_count
from hpcjobs.run import logs as job_logs
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import own_ids, read_attempts, read_job_manifest, read_request, read_state, task_dir
from hpcjobs.run.select import is_own
from hpcjobs.run.status import by_job, first_submitted, is_ours, is_reachable, statuses
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, connect
from hpcjobs.scheduler.slurm import parse
from hpcjobs.scheduler.slurm.outputs import accounted_files, files_of_steps, find_script
from hpcjobs.scheduler.slurm.parse import Table, TableRow, accounted_reason, parse_scontrol
from hpcjobs.scheduler_kind import CLUSTER
from hpcjobs.slurm_commands import read_hosts

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
"""A task that used this share of its node's memory reached the limit: samples are seconds apart."""
_BAD_NODE = re.compile(r"DOWN|FAIL|NOT_RESPONDING|DRAIN")


_TASK = r"[_+]\d+"
"""End of the id of an array task or a heterogeneous component."""


class Account(NamedTuple):
    """One job by sacct or scontrol; None: not known."""

    job_id: str
    """For an array or heterogeneous job, the id of the described task or component."""
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
    """Read ``job_id`` from sacct, or from scontrol if the accounting does not answer; None: unknown to both.

    For an array or heterogeneous job: the first failed task or component, or the first one if none failed.

    Args:
        is_meant: whether a record with this id is about the job; a cluster may have given the id out before or since.

    Raises:
        CommandMissingError: Slurm's commands are not on PATH.
    """
    lines = _read_scontrol(job_id, env=env, runner=runner)
    question = slurm_commands.list_accounted(*_TABLE, jobs=[job_id], steps=True, attempts=True, siblings=True)
    answer = runner(question, env=env)
    rows = list(_TABLE.rows(answer.out)) if answer.code == 0 else []
    numbered = _rows_of(job_id, rows)
    records = [*(r for line in lines for r in parse_scontrol(line)), *(_record(row) for _, row in numbered)]
    # The job submitted last: a controller that lost its state may have given the id to a job of another form before.
    meant = set(max(by_job(filter(is_meant, records)), key=first_submitted, default=[]))
    all_shown = _from_scontrol(job_id, [line for line in lines if all(r in meant for r in parse_scontrol(line))])
    # The last of several starts.
    last = {row.raw("JobID"): n for n, row in numbered if _record(row) in meant}
    all_accounted = {name: _from_row(name, rows[n], rows[n + 1 :]) for name, n in last.items()}
    known = sorted(
        [*all_shown.values(), *all_accounted.values()],
        key=lambda each: read_count(re.split(r"[_+]", each.job_id)[-1]) or 0,
    )
    if not known:
        return None
    failed = (each for each in known if each.state.ended and each.state is not State.COMPLETED)
    chosen = next(failed, known[0]).job_id
    accounted, shown = all_accounted.get(chosen), all_shown.get(chosen)
    if accounted is None or shown is None:
        return accounted or shown
    is_alive = not shown.state.ended and shown.state is not State.COMPLETING
    # Of one start the end is the later news.
    if accounted.state.ended and is_alive and (shown.started is None or shown.started != accounted.started):
        return shown  # the accounting has an earlier start, or an earlier job of a cluster that gives ids again
    account = accounted._replace(logs=shown.logs, work_dir=shown.work_dir or accounted.work_dir)
    if accounted.state.ended:
        return account
    # The accounting lags behind a job that has just ended, and keeps no reason of one that waits (Slurm 24.11).
    return account._replace(state=shown.state, reason=shown.reason)


def failed_nodes(account: Account, *, env: dict[str, str], runner: Runner = run) -> tuple[str, ...]:
    """Failed nodes of a job, by the accounting's events; without events, nodes that are down or drained now."""
    if not account.nodes:
        return ()
    if account.started is not None:
        # A node may be back in service long before somebody looks.
        events = slurm_commands.list_node_events(["NodeName", "State"], account.nodes, account.started)
        answer = runner(events, env=env)
        known = [line.partition("|") for line in answer.out.splitlines()] if answer.code == 0 else []
        if down := tuple(dict.fromkeys(node for node, _, state in known if _BAD_NODE.search(state.upper()))):
            return down
    answer = runner(slurm_commands.list_node_states(account.nodes), env=env)
    rows = (line.split() for line in answer.out.splitlines()) if answer.code == 0 else iter(())
    return tuple(dict.fromkeys(row[0] for row in rows if len(row) == 2 and _BAD_NODE.search(row[1].upper())))


def _rows_of(job_id: str, rows: list[TableRow]) -> list[tuple[int, TableRow]]:
    """The rows of the job, or of its tasks or components, with their places."""
    of_job = re.compile(re.escape(job_id) + f"(?:{_TASK})?")
    all_own = [(n, row) for n, row in enumerate(rows) if of_job.fullmatch(row.raw("JobID"))]
    # In a federation the cluster that the job left has a row too, and in any place.
    return [(n, row) for n, row in all_own if row.state() is not State.REVOKED] or all_own


def _record(row: TableRow) -> JobRecord:
    """The columns that identify a job."""
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
    """The step with the state OUT_OF_MEMORY, or a killed step with a task at the limit."""
    for step in steps:
        state, rss = step.state(), parse.read_bytes(step.raw("MaxRSS"))
        is_over = limit is not None and rss is not None and rss >= _NEAR_LIMIT * limit
        is_killed = state in (State.CANCELLED, State.FAILED)
        if state is State.OUT_OF_MEMORY or (is_over and is_killed):
            name = step.raw("JobID").partition(".")[2]
            return StepRecord(name, state.value, rss, step.text("MaxRSSNode"), step.count("MaxRSSTask"))
    return None


def _read_scontrol(job_id: str, *, env: dict[str, str], runner: Runner) -> list[str]:
    answer = runner(slurm_commands.show_job(job_id, siblings=True), env=env)
    shown = [line for line in answer.out.splitlines() if "JobState=" in line] if answer.code == 0 else []
    # In a federation, the cluster that the job left shows it too.
    return [line for line in shown if "JobState=REVOKED" not in line] or shown


def _from_scontrol(job_id: str, lines: list[str]) -> dict[str, Account]:
    jobs = [TableRow(parse.read_shown(line)) for line in lines]
    ids = [job_id] if len(jobs) == 1 else map(parse.read_shown_id, jobs)
    return {each: _make_account(each, job) for each, job in zip(ids, jobs, strict=True)}


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
        mem_per_node_bytes=parse.read_bytes(job.raw("MinMemoryNode")),
        cancelled_by=None,
        work_dir=job.name("WorkDir"),
        logs=tuple(dict.fromkeys(filter(None, (job.name("StdOut"), job.name("StdErr"))))),
        out_of_memory=None,
    )


def _hosts(text: str | None) -> tuple[str, ...]:
    return tuple(read_hosts(text))


def _per_node(text: str, nodes: int, cpus: int) -> int | None:
    """Bytes per node of sacct's ReqMem: ``4Gn`` per node, ``2Gc`` per CPU, since Slurm 21.08 ``8G`` of the job."""
    size = parse.read_bytes(text.rstrip("nc"))
    if not size:
        return None
    if text.endswith("n"):
        return size
    return size * cpus // nodes if text.endswith("c") else size // nodes


LogFile: TypeAlias = "tuple[Path, int | None]"
"""A file, and the rank that wrote it; None: several ranks."""
_RANK_FILE = re.compile(r"(?P<job>.*_)(?P<rank>\d{1,6})_log\.(?:out|err)")
"""How submitit names the files of each rank."""


def find_foreign_logs(account: Account, slurm: Scheduler) -> list[LogFile]:
    """The existing log files: named by scontrol, or by command line and script, or sbatch's default; and the files of
    the script's steps."""
    paths = [Path(log) for log in account.logs] or accounted_files(slurm, account.job_id)
    if not paths:
        paths = [Path(account.work_dir or ".", f"slurm-{account.job_id}.out")]
    for path in list(paths):
        if match := _RANK_FILE.fullmatch(path.name):
            paths += sorted(path.parent.glob(f"{glob.escape(match['job'])}*_log.*"))
    ranks = ((path, _RANK_FILE.fullmatch(path.name)) for path in paths if os.path.isfile(path))
    files = {path: None if match is None else int(match["rank"]) for path, match in ranks}
    if script := find_script(slurm, account.job_id):
        files.update(files_of_steps(script[0], job_id=account.job_id, name=account.name, folder=script[1]))
    return list(files.items())


def with_rank(lines: Sequence[LogLine], rank: int | None) -> list[LogLine]:
    """The lines with the rank of their file, where they have none of their own."""
    if rank is None:
        return list(lines)
    return [line if line.rank is not None else msgspec.structs.replace(line, rank=rank) for line in lines]


_NODE_FAILURES = ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED")
_ONE_TASK_PER_NODE = ("torchrun", "mpirun", "horovodrun")
"""Launchers that start the ranks of a node themselves."""
_BUNDLED = "hpcjobs.trainers."


class Subject(NamedTuple):
    """The job that is to be explained: its record and facts, and the lines of its logs."""

    record: JobRecord | None
    facts: JobFacts
    lines: list[LogLine]
    entry: Entry | None = None
    """Index entry of a job that hpcjobs submitted."""
    slurm_conf: str | None = None


def gather_entry(entry: Entry, *, log: Path | None = None) -> Subject:
    """Gather a job that hpcjobs submitted; of an array the first failed task, or the first one if none failed."""
    errors: list[SchedulerError] = []
    records = statuses([entry], errors=errors)[0].records
    for error in errors:  # the files of the job may still explain it
        warnings.warn(error.message, HpcJobsWarning, stacklevel=2)
    record = next((r for r in records if r.state.ended and r.state is not State.COMPLETED), records[0])
    index = read_count(record.job_id.rpartition("_")[2]) if entry.array is not None and "_" in record.job_id else None
    task = entry if index is None else msgspec.structs.replace(entry, task=index)
    facts, own = JobFacts(record.job_id, by_hpcjobs=True), record.source in ("job", "nobody")
    account = None
    if entry.kind.has_accounting and not errors and is_reachable(entry) and record.state is not State.PENDING:
        account = _account(entry, record.job_id)
    if account is not None:
        facts = _with_account(facts, account)
    facts = _with_run_folder(facts, task, record)
    if account is None or own or not account.state.ended:
        facts = _with_record(facts, record)
    existing = [(path, None) for path in job_logs.existing_paths(task)]
    files = [(log, None)] if log is not None else [*existing, *_files_of_steps(task)]
    facts = (
        _with_bad_nodes(facts, account, slurm_commands.question_env(entry.slurm_conf)) if account is not None else facts
    )
    return _subject(record, facts, files)._replace(entry=entry, slurm_conf=entry.slurm_conf)


def gather_foreign(
    job_id: str,
    *,
    entry: Entry | None = None,
    slurm_conf: str | None = None,
    log: Path | None = None,
    runner: Runner = run,
) -> Subject:
    """A job that was submitted by other means: by sacct and scontrol, and the log that scontrol names.

    With ``entry``, the one that it describes; else the one with ``job_id`` that was submitted last.

    Raises UnknownJobError: Slurm does not know it either. CommandMissingError: there is no Slurm here.
    """
    is_meant: Callable[[JobRecord], bool] = (lambda _: True) if entry is None else partial(is_ours, entry)
    account = read_account(job_id, env=slurm_commands.question_env(slurm_conf), runner=runner, is_meant=is_meant)
    if account is None:
        raise UnknownJobError(
            f"no job {job_id}: hpcjobs has not submitted it, and neither scontrol nor sacct knows it",
            hint="`hpcjobs why --log FILE` explains a log alone",
        )
    facts = _with_account(JobFacts(account.job_id), account)
    record = JobRecord(
        account.job_id, account.state, account.source, name=account.name, reason=account.reason,
        exit_code=account.exit_code, signal=account.signal, partition=account.partition,
    )  # fmt: skip
    facts = _with_bad_nodes(facts, account, slurm_commands.question_env(slurm_conf), runner=runner)
    slurm = connect(CLUSTER, slurm_conf, runner=runner)
    files = [(log, None)] if log is not None else find_foreign_logs(account, slurm)
    subject = _subject(record, facts, files)
    return subject._replace(slurm_conf=slurm_conf)


def gather_log(log: Path) -> Subject:
    """Gather a log without a job. Raises OSError: it cannot be read."""
    return Subject(None, JobFacts(None, logs=(str(log),)), read_lines(log))


def _account(entry: Entry, job_id: str) -> Account | None:
    try:
        return read_account(job_id, env=slurm_commands.question_env(entry.slurm_conf), is_meant=partial(is_ours, entry))
    except CommandMissingError:
        return None  # the run folder still says much


def _with_account(facts: JobFacts, account: Account) -> JobFacts:
    return msgspec.structs.replace(
        facts,
        name=account.name,
        state=account.state.value,
        source=account.source,
        reason=account.reason,
        exit_code=account.exit_code,
        signal=account.signal,
        nodes=account.nodes,
        elapsed_s=account.elapsed_s,
        time_limit_s=account.time_limit_s,
        mem_per_node_bytes=account.mem_per_node_bytes,
        cancelled_by=account.cancelled_by,
        out_of_memory=account.out_of_memory,
    )


def _with_record(facts: JobFacts, record: JobRecord) -> JobFacts:
    return msgspec.structs.replace(
        facts,
        state=record.state.value,
        source="hpcjobs" if record.source == "nobody" else record.source,
        reason=record.reason,
        exit_code=record.exit_code,
        signal=record.signal,
        nodes=facts.nodes or _nodes(record.node_list),
    )


def _with_run_folder(facts: JobFacts, entry: Entry, record: JobRecord) -> JobFacts:
    """Add the facts of state.json and manifest.json."""
    state = read_state(entry, record.job_id)
    request = read_request(entry)
    job = request or RequestedJob()
    failure = None
    if state is not None and state.first_failure is not None and record.state is not State.CANCELLED:
        first = state.first_failure
        failure = Failure(STATE, first.rank, first.host, first.exit_code)
    attempts = read_attempts(task_dir(Path(entry.run_dir), record.job_id))
    return msgspec.structs.replace(
        facts,
        name=entry.name,
        site=entry.site,
        run_dir=entry.run_dir,
        is_own=is_own(entry),
        failure=failure,
        decision=attempts[-1].decision if attempts else None,
        nodes=facts.nodes or _nodes(state.nodes if state else record.node_list),
        ranks_per_node=None if request is None else request.ntasks_per_node,
        tasks_are_ranks=job.launcher not in _ONE_TASK_PER_NODE,
        python=job.python if is_own(entry) and job.container is None else None,
        image=None if job.container is None else str(job.container.get("image")),
        bundled_trainer=any(str(arg).startswith(_BUNDLED) for arg in job.argv),
    )


def _with_bad_nodes(facts: JobFacts, account: Account, env: dict[str, str], *, runner: Runner = run) -> JobFacts:
    if facts.state not in _NODE_FAILURES:
        return facts
    return msgspec.structs.replace(facts, failed_nodes=failed_nodes(account, env=env, runner=runner))


def _nodes(text: str | None) -> tuple[str, ...]:
    return tuple(read_hosts(text))


def _files_of_steps(entry: Entry) -> list[LogFile]:
    script = Path(entry.run_dir) / BATCH_SCRIPT
    if entry.is_foreign or not script.is_file():
        return []
    folder = Path(read_job_manifest(Path(entry.run_dir)).job.chdir)
    ids = own_ids(entry)
    return [file for job_id in ids for file in files_of_steps(script, job_id=job_id, name=entry.name, folder=folder)]


def _lines_of(path: Path, rank: int | None) -> list[LogLine] | None:
    try:
        return with_rank(read_lines(path), rank)
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {reason_of(error)}", HpcJobsWarning, stacklevel=3)
        return None


def _subject(record: JobRecord, facts: JobFacts, files: Iterable[LogFile]) -> Subject:
    lines: list[LogLine] = []
    readable: list[str] = []
    for path, rank in files:
        own = _lines_of(path, rank)
        if own is not None:
            lines += own
            readable.append(str(path))
    return Subject(record, msgspec.structs.replace(facts, logs=tuple(readable)), lines)
