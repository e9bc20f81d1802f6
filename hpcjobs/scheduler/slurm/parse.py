"""Parses job records from sbatch, squeue, sacct and scontrol. Values are read by the name of their column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.slurm.fields import read_job_name, read_shown
from hpcjobs.scheduler.slurm.table import Table, TableRow

_ACCOUNTED = (
    *("JobID", "JobName", "State", "Reason", "Partition", "NodeList", "NNodes"),
    *("Submit", "Start", "End", "ElapsedRaw"),
)
ACCOUNTED: Final = Table((*_ACCOUNTED, "SubmitLine", "ExitCode"))
"""The columns of sacct. SubmitLine may hold newlines, and so is not the last one."""
ACCOUNTED_BEFORE_20_11: Final = Table((*_ACCOUNTED, "ExitCode"))
"""The same of a Slurm that keeps no sbatch command."""
QUEUED: Final = Table(
    (
        *("JobID", "JobName", "State", "Reason", "Partition", "NodeList", "NNodes"),
        *("Submit", "Start", "Elapsed", "TimeLimit", "Command"),
    )
)
"""The columns of squeue."""
SUBMISSIONS: Final = Table(("JobID", "SubmitLine"))
"""Columns of sacct that name a job's script."""
_SUBMITTED_SCRIPT = re.compile(r"\S*sbatch(?: --?\S+)* (/.*)")
_SUBMITTED = re.compile(r"^([0-9]+)(?:;(.*))?$", re.MULTILINE)
_SHOWN_JOB = re.compile(r"^(?=JobId=)", re.MULTILINE)


def parse_submitted(out: str) -> tuple[str, str | None] | None:
    """Job id and cluster that ``sbatch --parsable`` printed among a site's banners; None: no line is an id."""
    lines = _SUBMITTED.findall(out.replace("\r", ""))
    return (lines[-1][0], lines[-1][1].strip() or None) if lines else None


def parse_squeue(out: str) -> list[JobRecord]:
    """Records of the jobs in the table `QUEUED`."""
    return _where_they_are(_queued_job(row) for row in QUEUED.rows(out))


def _where_they_are(records: Iterable[JobRecord]) -> list[JobRecord]:
    """One record for each job of a federation; clusters that have revoked the job do not count."""
    by_id: dict[str, JobRecord] = {}
    for record in records:
        if record.state is not State.REVOKED:
            known = by_id.get(record.job_id)
            if known is None or known.state is State.PENDING:  # each cluster has it pending until one starts it
                by_id[record.job_id] = record
    return list(by_id.values())


def _queued_job(row: TableRow) -> JobRecord:
    state = row.state()
    pending = state is State.PENDING
    reason = row.text("Reason")
    is_held = (reason or "").startswith("JobHeld")  # the estimate is of before
    return JobRecord(
        job_id=row.raw("JobID"),
        state=state,
        source="squeue",
        name=read_job_name(row.raw("JobName")),
        reason=reason,
        partition=row.text("Partition"),
        node_list=row.text("NodeList"),
        nnodes=row.count("NNodes"),
        submitted=row.time("Submit"),
        started=None if pending else row.time("Start"),
        start_estimate=row.time("Start") if pending and not is_held else None,
        elapsed_s=None if pending else row.clock_s("Elapsed"),
        time_limit_s=row.clock_s("TimeLimit"),
        command=row.text("Command"),
    )


def parse_sacct(out: str, table: Table = ACCOUNTED) -> list[JobRecord]:
    """Records of the jobs in ``table``, one row per job (``--allocations``)."""
    return [_accounted_job(row) for row in table.rows(out)]


def _accounted_job(row: TableRow) -> JobRecord:
    state = row.state()
    code, signal = row.exit()
    return JobRecord(
        job_id=row.raw("JobID"),
        state=state,
        source="sacct",
        name=read_job_name(row.raw("JobName")),
        reason=accounted_reason(row),
        partition=row.text("Partition"),
        node_list=row.text("NodeList"),
        nnodes=row.count("NNodes"),
        submitted=row.time("Submit"),
        started=row.time("Start"),
        ended=row.time("End"),
        elapsed_s=row.count("ElapsedRaw"),
        exit_code=code if state.ended else None,
        signal=signal,
        command=_submitted_script(row.raw("SubmitLine")),
    )


def _submitted_script(line: str) -> str | None:
    """The script of an sbatch command line, without quotes; None if options may be a part of it."""
    match = _SUBMITTED_SCRIPT.fullmatch(line)
    return None if match is None else match[1]


def accounted_reason(row: TableRow) -> str | None:
    """Why the job waits, or never started.

    sacct keeps a job's last reason for waiting, which does not explain the end of a job that ran.
    """
    has_run = row.state().ended and row.time("Start") is not None
    return None if has_run else row.text("Reason")


def parse_scontrol(out: str) -> list[JobRecord]:
    """Records of ``scontrol --oneliner show job`` (SLURM_TIME_FORMAT=%s)."""
    jobs = (" ".join(text.splitlines()) for text in _SHOWN_JOB.split(out))  # a job's name may hold newlines
    rows = (TableRow(read_shown(job)) for job in jobs)
    return _where_they_are(_parse_shown_job(row) for row in rows if "JobId" in row and "JobState" in row)


def _parse_shown_job(row: TableRow) -> JobRecord:
    state = row.state("JobState")
    code, signal = row.exit()
    array, task = row.raw("ArrayJobId"), row.raw("ArrayTaskId")
    return JobRecord(
        job_id=_task_id(array, task) if array and task else row.raw("JobId"),
        state=state,
        source="scontrol",
        name=read_job_name(row.raw("JobName")),
        reason=row.text("Reason"),
        partition=row.text("Partition"),
        node_list=row.text("NodeList"),
        nnodes=_least_nodes(row),
        submitted=row.time("SubmitTime"),
        started=row.time("StartTime"),
        ended=row.time("EndTime") if state.ended else None,
        elapsed_s=None if state is State.PENDING else row.clock_s("RunTime"),
        exit_code=code if state.ended else None,
        signal=signal,
        restarts=row.count("Restarts"),
        time_limit_s=row.clock_s("TimeLimit"),
        command=row.text("Command"),
        user=row.raw("UserId").partition("(")[0] or None,
    )


def _task_id(array: str, task: str) -> str:
    """scontrol writes pending tasks without the brackets that squeue and sacct put around them."""
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


def _least_nodes(row: TableRow) -> int | None:
    """``2`` or, of a job that waits, ``2-4``."""
    least = row.raw("NumNodes").partition("-")[0]
    return int(least) if least.isdigit() else None
