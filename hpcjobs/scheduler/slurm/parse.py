"""What Slurm's commands print: sbatch's job id and estimates, and records of squeue, sacct and scontrol.

Columns are asked for by name and separated by a character that job names cannot hold; a line of
another shape (a name with a newline in it) is skipped rather than misread.
"""

from __future__ import annotations

import re
import time
from typing import Final

from hpcjobs.scheduler.base import JobRecord, State

SEPARATOR: Final = "\x1f"
SACCT_COLUMNS: Final = (
    *("JobID", "JobName", "State", "Reason", "Partition", "NodeList", "NNodes"),
    *("Submit", "Start", "End", "ElapsedRaw", "ExitCode"),
)
_SQUEUE_FIELDS = ("i", "j", "T", "r", "P", "N", "D", "V", "S", "M", "o")
SQUEUE_FORMAT: Final = SEPARATOR.join(f"%{field}" for field in _SQUEUE_FIELDS)

_NOTHING = frozenset(("", "N/A", "None", "Unknown", "NONE", "None assigned", "(null)"))


_JOB_ID = re.compile(r"^([0-9]+)(?:;(.*))?$", re.MULTILINE)
_EXPECTED_START = re.compile(r"\bstart(?:s|ing)?(?: ?time)?(?:[:=]| at| is)\s*(\S+?)[,.;]?(?:\s|$)", re.IGNORECASE)


def parse_submitted(out: str) -> tuple[str, str | None] | None:
    """Job id and cluster that ``sbatch --parsable`` printed among a site's banners; None: no line is an id."""
    lines = _JOB_ID.findall(out.replace("\r", ""))
    return (lines[-1][0], lines[-1][1].strip() or None) if lines else None


def parse_test_only(text: str) -> float | None:
    """When ``sbatch --test-only`` expects the job to start (seconds since 1970); None: it does not tell.

    The line is ``sbatch: Job 7 to start at TIME using ...`` on standard error. TIME is in seconds with
    SLURM_TIME_FORMAT=%s, local time where a version ignores that.
    """
    for expected in _EXPECTED_START.findall(text):
        if expected.isdigit():
            return float(expected)
        try:
            return time.mktime(time.strptime(expected, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None


def _text(value: str) -> str | None:
    return None if value in _NOTHING else value


def _epoch(value: str) -> float | None:
    """Seconds since 1970 as SLURM_TIME_FORMAT=%s prints them; 0 is Slurm's "not yet"."""
    return float(value) if value.isdigit() and value != "0" else None


def _count(value: str) -> int | None:
    return int(value) if value.isdigit() else None


def _clock_s(value: str) -> float | None:
    """``1-02:03:04``, ``02:03:04`` or ``03:04`` -> seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", value)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _exit(value: str) -> tuple[int | None, int | None]:
    """``3:0`` -> (3, None): exit code and signal."""
    code, _, signal = value.partition(":")
    return _count(code), (_count(signal) or None)


def _rows(out: str, columns: int) -> list[list[str]]:
    rows = (line.split(SEPARATOR) for line in out.split("\n"))
    return [row for row in rows if len(row) == columns]


def parse_squeue(out: str) -> list[JobRecord]:
    """Records of ``squeue --format=SQUEUE_FORMAT`` (SLURM_TIME_FORMAT=%s)."""
    return [_queued(*(field.strip() for field in row)) for row in _rows(out, len(_SQUEUE_FIELDS))]


def _queued(
    job_id: str, name: str, state: str, reason: str, partition: str, node_list: str, nnodes: str,
    submitted: str, start: str, elapsed: str, command: str,
) -> JobRecord:  # fmt: skip
    parsed = State.parse(state)
    pending = parsed is State.PENDING
    return JobRecord(
        job_id=job_id,
        state=parsed,
        source="squeue",
        name=_text(name),
        reason=_text(reason),
        partition=_text(partition),
        node_list=_text(node_list),
        nnodes=_count(nnodes),
        submitted=_epoch(submitted),
        started=None if pending else _epoch(start),
        start_estimate=_epoch(start) if pending else None,
        elapsed_s=None if pending else _clock_s(elapsed),
        command=_text(command),
    )


def parse_sacct(out: str) -> list[JobRecord]:
    """Records of ``sacct --allocations --parsable2 --format=SACCT_COLUMNS`` (SLURM_TIME_FORMAT=%s)."""
    return [_accounted(*row) for row in _rows(out, len(SACCT_COLUMNS))]


def _accounted(
    job_id: str, name: str, state: str, reason: str, partition: str, node_list: str, nnodes: str,
    submitted: str, started: str, ended: str, elapsed: str, exit_code: str,
) -> JobRecord:  # fmt: skip
    code, signal = _exit(exit_code)
    parsed = State.parse(state)
    # sacct keeps the last reason for which the job waited: once it has started, that does not explain its end.
    explains = not parsed.ended or _epoch(started) is None
    return JobRecord(
        job_id=job_id,
        state=parsed,
        source="sacct",
        name=_text(name),
        reason=_text(reason) if explains else None,
        partition=_text(partition),
        node_list=_text(node_list),
        nnodes=_count(nnodes),
        submitted=_epoch(submitted),
        started=_epoch(started),
        ended=_epoch(ended),
        elapsed_s=float(elapsed) if elapsed.isdigit() else None,
        exit_code=code if parsed.ended else None,
        signal=signal,
    )


def _task_id(array: str, task: str) -> str:
    """scontrol writes pending tasks without the brackets that squeue and sacct put around them."""
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


def parse_scontrol(out: str) -> list[JobRecord]:
    """Records of ``scontrol --oneliner show job`` (SLURM_TIME_FORMAT=%s)."""
    records = []
    for line in out.splitlines():
        # The first of a name counts: the comments of users and sites, at the end, may hold NAME=VALUE too.
        fields = dict(reversed(re.findall(r"(?:^| )([A-Z][A-Za-z:/]*)=(\S*)", line)))
        if "JobId" not in fields or "JobState" not in fields:
            continue
        code, signal = _exit(fields.get("ExitCode", ""))
        state = State.parse(fields["JobState"])
        array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
        records.append(
            JobRecord(
                job_id=_task_id(array, task) if array and task else fields["JobId"],
                state=state,
                source="scontrol",
                name=_text(fields.get("JobName", "")),
                reason=_text(fields.get("Reason", "")),
                partition=_text(fields.get("Partition", "")),
                node_list=_text(fields.get("NodeList", "")),
                nnodes=_count(fields.get("NumNodes", "").split("-")[0]),
                submitted=_epoch(fields.get("SubmitTime", "")),
                started=_epoch(fields.get("StartTime", "")),
                ended=_epoch(fields.get("EndTime", "")) if state.ended else None,
                exit_code=code if state.ended else None,
                signal=signal,
                restarts=_count(fields.get("Restarts", "")),
                command=_text(fields.get("Command", "")),
                user=_text(fields.get("UserId", "").partition("(")[0]),
            )
        )
    return records
