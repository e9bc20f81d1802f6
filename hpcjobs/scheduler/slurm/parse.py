"""Parses job records from sbatch, squeue, sacct and scontrol. Values are read by the name of their column.

``slurm_commands.list_queue(*table)`` and ``list_accounted(*table)`` request a table. ``table.rows(out)`` gives a
`TableRow` per job: ``row.count("NNodes")``, ``row.time("Submit")``. ``table.split(rest + block)`` gives the records of
an answer that is too large to hold, block by block.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from hpcjobs.errors import SchedulerError
from hpcjobs.record import JOB_SCRIPT
from hpcjobs.record.values import read_count as as_count
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.units import count_tasks

NOTHING: Final = frozenset(("", "Unknown", "None", "NONE", "N/A", "None assigned", "(null)"))
"""Slurm's texts for a missing value."""
NO_NUMBER: Final = frozenset(("UNLIMITED", "Partition_Limit", "INVALID"))
"""Slurm's texts for a missing number."""
NO_VALUE: Final = frozenset((4294967294, 4294967295, 18446744073709551614, 18446744073709551615))
"""Its NO_VAL, INFINITE, NO_VAL64 and INFINITE64, which some versions print as a number."""
MOST_SECONDS: Final = 1e11
"""No time of Slurm's is after the year 5138, and no duration is longer; a sum of two is still before the year 10000."""
_MOST_BYTES: Final = 1 << 56
UNIT_BYTES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)", re.ASCII)
_SHOWN_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z_:/]*)=(.*?)(?= [A-Z][A-Za-z_:/]*=|\s*$)")
_SIZE = re.compile(r"(\d+(?:\.\d*)?)([KMGTP]?)[BN]?", re.ASCII)


def read_shown(record: str) -> dict[str, str]:
    """The fields of one record of ``scontrol --oneliner show``; a value, such as a path, may hold blanks.

    The first field of a name counts: the comments of users and sites, at the end, may hold NAME=VALUE too. A job's name
    may as well, and goes up to UserId. A job with two of these has no fields: its user may have invented either.
    """
    if record.startswith("JobId=") and record.count(" UserId=") > 1:
        return {}
    before, _, behind = record.partition(" JobName=")
    name, *rest = behind.split(" UserId=")
    if not before.startswith("JobId=") or not rest:
        return dict(reversed(_SHOWN_FIELD.findall(record)))
    if " HetJobId=" in before:  # then the name is followed by the set of the job's components
        name = name.rpartition(" HetJobIdSet=")[0] or name
    behind_name = _SHOWN_FIELD.findall(f"UserId={rest[0]}")
    return dict(reversed([*_SHOWN_FIELD.findall(before), ("JobName", name), *behind_name]))


def read_text(value: str) -> str | None:
    """A text for people."""
    return None if value in NOTHING else _decodable(value)


def read_name(value: str) -> str | None:
    """A name that a user chose, which may be any word: ``None`` too.

    slurmdbd calls a job "allocation" that ended before slurmctld sent its name, for some seconds.
    """
    return None if value in ("", "(null)", "allocation") else value


def read_job_name(value: str) -> str | None:
    """A job's name as slurmdbd keeps it, so that records can be compared."""
    name = read_name(value)
    return None if name is None else _decodable(name)


def _decodable(text: str) -> str:
    """``text`` with ``?`` for each byte that is not UTF-8, as slurmdbd keeps it."""
    return text.encode("utf-8", "replace").decode()


def read_count(value: str) -> int | None:
    """A whole number that is not negative."""
    number = as_count(value)  # NO_VAL64 and INFINITE64 have more digits than that reads
    return None if number in NO_VALUE else number


def read_time(value: str) -> float | None:
    """Seconds since 1970, as SLURM_TIME_FORMAT=%s prints them; 0 is Slurm's "not yet"."""
    moment = as_count(value)
    return float(moment) if moment and moment < MOST_SECONDS else None


def read_clock_s(value: str | None) -> float | None:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04`` or ``03:04.567``."""
    match = _CLOCK.fullmatch(value or "")
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    duration = days * 86400 + hours * 3600 + minutes * 60 + seconds
    return duration if duration < MOST_SECONDS else None


def read_bytes(value: str | None) -> int | None:
    """Bytes of ``2048M``, ``1.5G``, ``218296K`` (powers of 1024) or ``123456``."""
    match = _SIZE.fullmatch((value or "").upper())
    size = float(match[1]) * UNIT_BYTES[match[2]] if match else math.inf
    return round(size) if size < _MOST_BYTES else None


def read_exit(value: str) -> tuple[int | None, int | None]:
    """Exit code and signal of ``3:9``; signal 0 is read as None."""
    code, _, signal = value.partition(":")
    return read_count(code), read_count(signal) or None


def read_resource(value: str, resource: str) -> str | None:
    """The amount of ``resource`` in a list such as ``billing=4,cpu=4,mem=2048M,node=2``."""
    amounts = (part.partition("=") for part in value.split(","))
    return next((amount for name, _, amount in amounts if name == resource), None)


def count_gpus(value: str) -> int | None:
    """GPUs of ``gres/gpu=2,gres/gpu:a100=2``: the count without a type, or the sum over all types."""
    if (total := read_resource(value, "gres/gpu")) is not None:
        return read_count(total)
    of_types = [read_count(part.partition("=")[2]) for part in value.split(",") if part.startswith("gres/gpu:")]
    counts = [count for count in of_types if count is not None]
    return sum(counts) if counts and len(counts) == len(of_types) else None


SEPARATOR: Final = "\x1f"
CONTROL: Final = "".join(chr(code) for code in range(1, 31) if chr(code) not in "\t\n\v\f\r")
_JOB_ID = re.compile(r"\s*[0-9]{1,18}(?![0-9])")
_COMPLETE_ID = re.compile(r"[0-9]{1,18}(?:[_+][0-9]{1,18})?\Z")


def new_separator() -> str:
    """A random separator, which no job name can contain on purpose: for rows of other users' jobs."""
    return SEPARATOR + "".join(CONTROL[byte % len(CONTROL)] for byte in os.urandom(3))


class TableRow:
    """One row of a table, or one record of scontrol: values by the name of their column. None: no such value."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __contains__(self, column: str) -> bool:
        return column in self._values

    def raw(self, column: str) -> str:
        """The value as printed; empty if missing."""
        return self._values.get(column, "")

    def text(self, column: str) -> str | None:
        return read_text(self.raw(column))

    def name(self, column: str) -> str | None:
        """A name that a user chose."""
        return read_name(self.raw(column))

    def count(self, column: str) -> int | None:
        return read_count(self.raw(column))

    def time(self, column: str) -> float | None:
        """Seconds since 1970."""
        return read_time(self.raw(column))

    def clock_s(self, column: str) -> float | None:
        """Seconds of a duration such as ``1-02:03:04``."""
        return read_clock_s(self.raw(column))

    def exit(self, column: str = "ExitCode") -> tuple[int | None, int | None]:
        """Exit code and signal."""
        return read_exit(self.raw(column))

    def state(self, column: str = "State") -> State:
        return State.parse(self.raw(column))


class Split(NamedTuple):
    """An answer, or a block of one, as records of one line each."""

    records: list[str]
    merged: list[str]
    """Those of the records that were several lines: a name holds a newline."""
    refused: list[str]
    """Other lines, for example banners and lines cut off."""
    rest: str
    """The incomplete record at the end of the block; the next block continues it."""


class Table(NamedTuple):
    """Columns by sacct's names, JobID first, and the separator of their values."""

    columns: tuple[str, ...]
    separator: str = SEPARATOR

    def rows(self, out: str) -> Iterator[TableRow]:
        """The rows of a complete answer; other lines are left out."""
        for record in self.split(out if out.endswith("\n") else f"{out}\n").records:
            values = (value.strip() for value in record.split(self.separator))
            yield TableRow(dict(zip(self.columns, values, strict=True)))

    def split(self, block: str) -> Split:
        """The records of ``block``, told apart by counting separators, since names may hold newlines.

        A line that is a complete record ends an incomplete record before it, which was cut off.
        """
        records: list[str] = []
        merged: list[str] = []
        refused: list[str] = []
        held: list[str] = []
        separators = 0
        *lines, rest = block.split("\n")
        for line in lines:
            begins, here = _JOB_ID.match(line) is not None, line.count(self.separator)
            if held and begins and here == len(self.columns) - 1:
                refused.append(" ".join(held))
                held, separators = [], 0
            if not held and not begins:
                refused += [line] if line.strip() else []
                continue
            held.append(line)
            separators += here
            if separators < len(self.columns) - 1:
                continue
            if separators == len(self.columns) - 1:
                records.append(" ".join(held))
                merged += records[-1:] if len(held) > 1 else []
            else:
                refused.append(" ".join(held))
            held, separators = [], 0
        return Split(records, merged, refused, "".join(f"{line}\n" for line in held) + rest)


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
    """Job id and cluster that ``sbatch --parsable`` printed among banners; None: no line is one, or several are."""
    lines = set(_SUBMITTED.findall(out.replace("\r", "")))
    if len(lines) != 1:
        return None
    ((job_id, cluster),) = lines
    return job_id, cluster.strip() or None


_ABOUT_TASKS = re.compile(r"[0-9]+_[0-9,\[\]-]+: (.*)")
_CHANGED = "No error"
_ENDED = ("Job has already finished", "Job/step already completing or completed")


def is_refused_by_ended_alone(message: str) -> bool:
    """Whether scontrol changed tasks of an array, and refused only others that have ended: it lists all of them."""
    matches = [_ABOUT_TASKS.fullmatch(line.strip()) for line in message.splitlines() if line.strip()]
    texts = {match and match[1] for match in matches}
    return _CHANGED in texts and texts.issubset((_CHANGED, *_ENDED))


def parse_squeue(out: str, *, lists_ended: bool = False) -> list[JobRecord]:
    """Records of the jobs in the table `QUEUED`.

    ``lists_ended``: of a squeue that was asked for them. Another lists a job as REVOKED while another cluster of the
    federation has it; without a row of that cluster, which then did not answer, the job counts as running.
    """
    records = [_queued_job(row) for row in QUEUED.rows(out)]
    jobs = _choose_clusters(records)
    if lists_ended:
        return jobs
    there = {_REVOKED_ID, *(record.job_id for record in jobs)}
    return [*jobs, *(replace(r, state=State.RUNNING, reason=_SILENT) for r in records if r.job_id not in there)]


_REVOKED_ID = "4294967294"
"""Slurm's NO_VAL, of a job of a federation that is another cluster's by now."""
_SILENT = "its cluster of the federation does not answer"


def _choose_clusters(records: Iterable[JobRecord]) -> list[JobRecord]:
    """One record for each job of a federation, of the cluster that runs it, else of its last start.

    Each cluster has it pending until one starts it, which the others show as REVOKED. A requeue may leave the end of an
    earlier start on one cluster.
    """
    by_id: dict[str, JobRecord] = {}
    for record in records:
        if record.state is not State.REVOKED:
            known = by_id.get(record.job_id)
            if known is None or _recency(record) > _recency(known):
                by_id[record.job_id] = record
    return list(by_id.values())


def _recency(record: JobRecord) -> tuple[bool, bool, float]:
    """A job that lives, one that runs, the later submission: each counts more than what follows it."""
    is_running = record.state not in (State.PENDING, State.COMPLETING)
    return not record.state.ended, is_running, record.submitted or 0.0


def _read_id(job_id: str, command: str) -> str:
    """The id, whose list of tasks is complete."""
    if _COMPLETE_ID.match(job_id):
        return job_id
    try:
        parent, _, tasks = job_id.partition("_")
        if not _COMPLETE_ID.match(parent) or not tasks.startswith("["):
            raise ValueError("no id of a job")
        count_tasks(job_id)
    except ValueError as error:
        raise SchedulerError(
            f"{command} printed the job {job_id[:80]!r}: {error}",
            hint="where Slurm cuts long lists of tasks, SLURM_BITSTR_LEN=0 makes it print all",
        ) from error
    return job_id


def _queued_job(row: TableRow) -> JobRecord:
    state = row.state()
    pending = state is State.PENDING
    record = JobRecord(
        job_id=_read_id(row.raw("JobID"), "squeue"),
        state=state,
        source="squeue",
        name=read_job_name(row.raw("JobName")),
        reason=row.text("Reason"),
        partition=row.text("Partition"),
        node_list=row.text("NodeList"),
        nnodes=row.count("NNodes"),
        submitted=row.time("Submit"),
        started=None if pending else row.time("Start"),
        start_estimate=row.time("Start") if pending else None,
        elapsed_s=None if pending else row.clock_s("Elapsed"),
        time_limit_s=row.clock_s("TimeLimit"),
        command=row.name("Command"),
    )
    return replace(record, start_estimate=None) if record.is_held else record  # the estimate is of before


def parse_sacct(out: str, table: Table = ACCOUNTED) -> list[JobRecord]:
    """Records of the jobs in ``table``, which has one row per job and cluster of a federation (``--allocations``)."""
    return _without_earlier_starts([_accounted_job(row) for row in table.rows(out)])


def _without_earlier_starts(records: list[JobRecord]) -> list[JobRecord]:
    """Drop starts of a job that precede one which has ended: in a federation each cluster shows its last one.

    Two clusters that are no federation have jobs of one id, which differ in their script, or in their name.
    """
    last: dict[tuple[str, str | None, str | None], float] = {}
    for record in records:
        if record.state.ended and record.state is not State.REVOKED:
            key = record.job_id, record.name, record.command
            last[key] = max(last.get(key, 0.0), record.submitted or 0.0)
    return [
        record
        for record in records
        if (record.submitted or 0.0) >= last.get((record.job_id, record.name, record.command), 0.0)
    ]


def _accounted_job(row: TableRow) -> JobRecord:
    state = row.state()
    code, signal = row.exit()
    return JobRecord(
        job_id=_read_id(row.raw("JobID"), "sacct"),
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
        elapsed_s=as_count(row.raw("ElapsedRaw"), digits=10),
        exit_code=code if state.ended else None,
        signal=signal,
        command=_submitted_script(row.raw("SubmitLine")),
    )


def _submitted_script(line: str) -> str | None:
    """The script of an sbatch command line, without quotes; None if options may be a part of it."""
    match = _SUBMITTED_SCRIPT.fullmatch(line)
    if match is None or (" -" in match[1] and not match[1].endswith(f"/{JOB_SCRIPT}")):
        return None  # `-D / -o x`: a path behind a short option; of ours the end of the path counts
    return match[1]


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
    return _choose_clusters(_parse_shown_job(row) for row in rows if "JobId" in row and "JobState" in row)


def _parse_shown_job(row: TableRow) -> JobRecord:
    state = row.state("JobState")
    code, signal = row.exit()
    return JobRecord(
        job_id=_read_id(read_shown_id(row), "scontrol"),
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
        command=row.name("Command"),
        user=row.raw("UserId").partition("(")[0] or None,
    )


def read_shown_id(row: TableRow) -> str:
    """The id that squeue and sacct print, of one record of ``scontrol show job``: ``12_3``, ``12_[3-5]`` or ``24+1``.

    scontrol writes pending tasks without the brackets that the others put around them.
    """
    if (task := row.raw("ArrayTaskId")) and (array := row.raw("ArrayJobId")):
        return f"{array}_{task}" if as_count(task) is not None else f"{array}_[{task}]"
    if (offset := row.count("HetJobOffset")) is not None and (leader := row.raw("HetJobId")):
        return f"{leader}+{offset}"
    return row.raw("JobId")


def _least_nodes(row: TableRow) -> int | None:
    """``2`` or, of a job that waits, ``2-4``."""
    return read_count(row.raw("NumNodes").partition("-")[0])
