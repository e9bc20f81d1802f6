"""Collects what is known of a job: from its run folder, the scheduler, and its log."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcjobs.diagnosis.accounting import Account, failed_nodes, read_account
from hpcjobs.diagnosis.foreign_logs import LogFile, find_foreign_logs, with_rank
from hpcjobs.diagnosis.log import read_lines
from hpcjobs.diagnosis.values import Failure, JobFacts, LogLine
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, SchedulerError, UnknownJobError, reason_of
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run import logs as job_logs
from hpcjobs.run.folder import BATCH_SCRIPT, MANIFEST, STATE
from hpcjobs.run.identity import is_ours, is_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import own_ids, read_json, read_state
from hpcjobs.run.status import statuses
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.output_files import files_of_steps

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
    """Of a job that hpcjobs submitted."""
    slurm_conf: str | None = None


def gather_entry(entry: Entry, *, log: Path | None = None, runner: Runner = run) -> Subject:
    """A job that hpcjobs submitted; of an array the first task that failed, or else the first one."""
    errors: list[SchedulerError] = []
    records = statuses([entry], errors=errors)[0].records
    for error in errors:  # what the job wrote explains it all the same
        warnings.warn(error.message, HpcJobsWarning, stacklevel=2)
    record = next((r for r in records if r.state.ended and r.state is not State.COMPLETED), records[0])
    task = entry
    if entry.array is not None and "_" in record.job_id and record.job_id.rpartition("_")[2].isdigit():
        task = msgspec.structs.replace(entry, task=int(record.job_id.rpartition("_")[2]))
    facts, own = JobFacts(record.job_id, by_hpcjobs=True), record.source in ("job", "local", "nobody")
    account = None
    if entry.scheduler == "slurm" and not errors and is_reachable(entry) and record.state is not State.PENDING:
        account = _account(entry, record.job_id, runner)
    if account is not None:
        facts = _with_account(facts, account)
    facts = _with_run_folder(facts, task, record)
    if account is None or own or not account.state.ended:
        facts = _with_record(facts, record)
    files = [(log, None)] if log is not None else [*_logs_of(task), *_files_of_steps(task)]
    facts = _with_bad_nodes(facts, account, _env(entry.slurm_conf), runner) if account is not None else facts
    return _subject(record, facts, files)._replace(entry=entry, slurm_conf=entry.slurm_conf)


def gather_foreign(
    job_id: str, *, slurm_conf: str | None = None, log: Path | None = None, runner: Runner = run
) -> Subject:
    """A job that was submitted by other means: by sacct and scontrol, and the log that scontrol names.

    Raises:
        UnknownJobError: Slurm does not know it either. CommandMissingError: there is no Slurm here.
    """
    account = read_account(job_id, env=_env(slurm_conf), runner=runner)
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
    facts = _with_bad_nodes(facts, account, _env(slurm_conf), runner)
    slurm = SlurmScheduler(slurm_conf, runner=runner)
    files = [(log, None)] if log is not None else find_foreign_logs(account, slurm)
    subject = _subject(record, facts, files)
    return subject._replace(slurm_conf=slurm_conf)


def gather_log(log: Path) -> Subject:
    """A log alone, of which nothing else is known.

    Raises:
        OSError: it cannot be read.
    """
    return Subject(None, JobFacts(None, logs=(str(log),)), read_lines(log))


def _account(entry: Entry, job_id: str, runner: Runner) -> Account | None:
    try:
        return read_account(job_id, env=_env(entry.slurm_conf), runner=runner, is_meant=partial(is_ours, entry))
    except CommandMissingError:
        return None  # the run folder still says much


def _env(slurm_conf: str | None) -> dict[str, str]:
    return {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})


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
        source=record.source,
        reason=record.reason,
        exit_code=record.exit_code,
        signal=record.signal,
        nodes=facts.nodes or _nodes(record.node_list),
    )


def _with_run_folder(facts: JobFacts, entry: Entry, record: JobRecord) -> JobFacts:
    """What state.json and manifest.json add."""
    state = read_state(entry, record.job_id)
    job: dict[str, Any] = (read_json(Path(entry.run_dir) / MANIFEST, dict[str, Any]) or {}).get("job", {})
    failure = None
    if state is not None and state.first_failure is not None and record.state is not State.CANCELLED:
        first = state.first_failure
        failure = Failure(STATE, first.rank, first.host, first.exit_code)
    return msgspec.structs.replace(
        facts,
        name=entry.name,
        site=entry.site,
        run_dir=entry.run_dir,
        failure=failure,
        nodes=facts.nodes or _nodes(state.nodes if state else record.node_list),
        ranks_per_node=job.get("ntasks_per_node"),
        tasks_are_ranks=job.get("launcher") not in _ONE_TASK_PER_NODE,
        bundled_trainer=any(str(arg).startswith(_BUNDLED) for arg in job.get("argv", [])),
    )


def _with_bad_nodes(facts: JobFacts, account: Account, env: dict[str, str], runner: Runner) -> JobFacts:
    if facts.state not in _NODE_FAILURES:
        return facts
    return msgspec.structs.replace(facts, failed_nodes=failed_nodes(account, env=env, runner=runner))


def _nodes(text: str | None) -> tuple[str, ...]:
    return tuple(hosts_of(text)) if text else ()


def _logs_of(entry: Entry) -> list[LogFile]:
    return [(path, None) for path in job_logs.paths(entry) if path.exists()]


def _files_of_steps(entry: Entry) -> list[LogFile]:
    script = Path(entry.run_dir) / BATCH_SCRIPT
    if entry.is_foreign or not script.is_file():
        return []
    from hpcjobs.run.rerun import read_manifest  # loads all that resolves a request

    folder = Path(read_manifest(Path(entry.run_dir)).job.chdir)
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
