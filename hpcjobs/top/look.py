"""Takes snapshots of jobs: one question to each scheduler, and the files that have changed.

The values that the screen shows at one moment, and the actions of its keys on a row: log, why, cancel, a shell.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, SchedulerError, UnknownJobError
from hpcjobs.processes.programs import own_command, run
from hpcjobs.record import SUBMITTED
from hpcjobs.run import logs
from hpcjobs.run.control import cancel
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import output_dir, read_job_manifest
from hpcjobs.run.listing import Survey, scheduler_of, site_asked, survey
from hpcjobs.run.progress import (
    NodeSample,
    Progress,
    RunLines,
    current_samples,
    find_alarms,
    newest_samples,
    read_progress,
)
from hpcjobs.run.select import select
from hpcjobs.run.status import Connect, ConnectQueue, statuses
from hpcjobs.scheduler.base import JobQueue, JobRecord, State, connect
from hpcjobs.scheduler_kind import CLUSTER
from hpcjobs.top.rows import Group, JobRow, Snapshot, Task
from hpcjobs.units import parent_id

_LOG_LINES = 500
"""So many lines of a log are shown."""


class Actions(Protocol):
    """Calls of the screen; each raises HpcJobsError with a text to show."""

    def read_log(self, row: JobRow) -> list[str]: ...
    def explain(self, row: JobRow) -> list[str]: ...
    def cancel(self, row: JobRow) -> str: ...
    def shell(self, row: JobRow) -> Sequence[str]: ...


class RealActions:
    """By the functions of the verbs `logs`, `why`, `cancel` and `shell`."""

    def __init__(self, *, slurm_conf: str | None = None) -> None:
        self._slurm_conf = slurm_conf

    def read_log(self, row: JobRow) -> list[str]:
        """Return the last lines of the row's log; of a folded row, of its most important task."""
        selection = logs.Selection(last=_LOG_LINES)
        return [line.rstrip("\n") for line in logs.lines(_entry(row), selection=selection)][-_LOG_LINES:]

    def explain(self, row: JobRow) -> list[str]:
        """Return the output of ``hpcjobs why``."""
        result = run(own_command("why", _name(row)))
        return (result.out + result.err).splitlines()

    def cancel(self, row: JobRow) -> str:
        """Cancel all tasks of the row; return the outcome as text."""
        own = _entries(row)
        if not own:
            ids = sorted({task.record.job_id for task in row.tasks if not task.record.state.ended})
            connect(CLUSTER, self._slurm_conf).cancel(ids)
            return f"cancelled {' '.join(ids)}"
        outcome = cancel(own)
        if outcome.cancelled:
            return f"cancelled {' '.join(outcome.cancelled)}"
        if outcome.ended:
            return f"job {row.job} had ended before"
        raise RequestError(f"nothing cancelled: the scheduler does not know job {row.job}")

    def shell(self, row: JobRow) -> Sequence[str]:
        """The command that opens a shell on the first node of the row's job."""
        if row.first.record.state is not State.RUNNING:
            raise RequestError(f"job {row.job} is {row.first.record.state.value}: it has no node for a shell")
        _entry(row)
        return own_command("shell", _name(row))


def _entries(row: JobRow) -> list[Entry]:
    """The jobs of a row: one, the chunks of a sweep, or one task of an array."""
    if row.inside:
        return [_entry(row)] if row.first.entry is not None else []
    entries = [task.entry for task in row.tasks if task.entry is not None]
    return list({(entry.run_dir, entry.job_id): entry for entry in entries}.values())


def _entry(row: JobRow) -> Entry:
    task = row.first
    if task.entry is None:
        raise RequestError(f"job {row.job} was not submitted with hpcjobs, which does not know its run folder")
    _, _, index = task.record.job_id.partition("_")
    if task.entry.array is None or not index:
        return task.entry
    if not index.isdecimal():
        raise HpcJobsError(f"the tasks {task.record.job_id} wait together: choose the row of their array")
    return msgspec.structs.replace(task.entry, task=int(index))


def _name(row: JobRow) -> str:
    """How a command line names the row's job: by the run folder, which is one job's alone, if it can."""
    task = row.first
    if task.entry is None:
        return task.record.job_id.split("_[")[0]
    return task.record.job_id if task.entry.array is not None else task.entry.run_dir


ACCOUNT_S = 30.0
"""The accounting is asked about the same job at most this often."""
READ_TASKS = 16
"""The files of an array's running tasks are read while they are so few, or while the array is unfolded."""
FRESH_S = 900.0
"""Alarms are computed from younger samples only: three of the longest intervals of a sampler."""
DAY_S = 86_400.0


def select_watched(names: Sequence[str], *, site: str | None = None) -> list[Entry]:
    """The jobs that ``names`` name; also the folder that holds several run folders, a colleague's say.

    Raises UnknownJobError: a name stands for no job.
    """
    entries: list[Entry] = []
    for name in names:
        folder = Path(name)
        if folder.is_dir() and not (folder / SUBMITTED).is_file():
            inside = [path.parent for path in sorted(folder.glob(f"*/{SUBMITTED}"))]
            if not inside:
                raise UnknownJobError(
                    f"{folder} is no run folder of a submitted job (no {SUBMITTED}), and none lies in it"
                )
            entries += [entry for path in inside for entry in select([str(path.absolute())])]
        else:
            entries += select([name], site=site, foreign=True)
    return list({(entry.run_dir, entry.job_id, entry.task): entry for entry in entries}.values())


class _Files(NamedTuple):
    """Content of the files of one job, and their sizes and times when they were read."""

    marks: tuple[tuple[int, int], ...]
    progress: Progress | None
    nodes: tuple[NodeSample, ...]


class Looker:
    """Takes snapshots: of the named jobs, or, without any, of mine as ``hpcjobs ps`` lists them."""

    def __init__(
        self,
        entries: Sequence[Entry] = (),
        *,
        site: str | None = None,
        connect: Connect = connect,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._entries, self._site, self._clock = list(entries), site, clock
        self._since = clock() - DAY_S
        self._connect = _rarely_accounting(connect, clock)
        self._files: dict[Path, _Files] = {}
        self._run_lines = RunLines()
        self._limits: dict[str, int | None] = {}
        self._others: dict[str, JobRecord] = {}

    def look(self, *, unfolded: Collection[str] = ()) -> Snapshot:
        """Query and read; ``unfolded`` are keys of groups with all tasks on the screen.

        Raises ConfigError: the site's file cannot be used.
        """
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", HpcJobsWarning)
            known, others, failures, _ = self._ask()
            self._others = {**self._find_ends(others), **{record.job_id: record for record in others}}
            tasks = [
                Task(group, record, job.entry)
                for job in known
                for group in (_group_of(job.entry),)
                for record in job.records
            ]
            for record in self._others.values():
                parent = parent_id(record.job_id)
                tasks.append(Task(Group(f"other {parent}", parent, record.name or "-", None), record, None))
            read = self._with_files(tasks, unfolded)
        errors = dict.fromkeys([*map(str, failures), *(str(warning.message) for warning in noted)])
        return Snapshot(tuple(read), tuple(errors), self._clock())

    def reread(self, snapshot: Snapshot, *, unfolded: Collection[str] = ()) -> Snapshot:
        """Return the same jobs in the same states with the present content of their files; no scheduler is queried."""
        return snapshot._replace(tasks=tuple(self._with_files(snapshot.tasks, unfolded)))

    def _with_files(self, tasks: Sequence[Task], unfolded: Collection[str]) -> list[Task]:
        running = Counter(task.group.key for task in tasks if task.record.state is State.RUNNING)
        many = {key for key, count in running.items() if count > READ_TASKS and key not in unfolded}
        return [task if task.group.key in many else self._read_task(task) for task in tasks]

    def _ask(self) -> Survey:
        if not self._entries:
            return survey(since=self._since, site=self._site, connect=self._connect)
        failures: list[SchedulerError] = []
        return Survey(statuses(self._entries, connect=self._connect, errors=failures), [], failures)

    def _find_ends(self, queue: Iterable[JobRecord]) -> dict[str, JobRecord]:
        """Jobs submitted by other means that have left the queue since the first look, with the end that is known."""
        queued = {parent_id(record.job_id) for record in queue}
        left = {job_id: r for job_id, r in self._others.items() if parent_id(job_id) not in queued}
        open_ones = {parent_id(job_id) for job_id, record in left.items() if not record.state.ended}
        if open_ones:
            try:
                records = self._connect(*scheduler_of(site_asked(self._site))).account(open_ones)
                ends = {record.job_id: record for record in records}
            except HpcJobsError:  # without accounting their end stays unknown
                ends = {}
            for job_id in [job_id for job_id, record in left.items() if not record.state.ended]:
                unknown = msgspec.structs.replace(left[job_id], state=State.UNKNOWN, reason="it has left the queue")
                left[job_id] = ends.get(job_id, unknown)
        return left

    def _read_task(self, task: Task) -> Task:
        record, entry = task.record, task.entry
        running = record.state is State.RUNNING
        if running and record.started is not None:
            record = msgspec.structs.replace(record, elapsed_s=max(0.0, self._clock() - record.started))
        if running and record.time_limit_s is None and entry is not None:
            record = msgspec.structs.replace(record, time_limit_s=self._limit(entry))
        if entry is None or record.state in (State.PENDING, State.CONFIGURING):
            return task._replace(record=record)
        if task.progress is not None and not running:  # its files are complete
            return task
        progress, files = self._read(output_dir(Path(entry.run_dir), record.job_id))
        nodes = tuple(current_samples(files, record)) if running else ()
        # A sampler that no longer writes does not show the current load.
        fresh = [node for node in nodes if self._clock() - node.taken < FRESH_S]
        alarms = tuple(alarm.text for alarm in find_alarms(fresh))
        return task._replace(record=record, progress=progress, nodes=nodes, alarms=alarms)

    def _read(self, folder: Path) -> tuple[Progress | None, tuple[NodeSample, ...]]:
        """Read metrics.jsonl and monitor.jsonl if they have changed."""
        try:  # of a thousand tasks, one listing each is quick, and a search by pattern is not
            names = sorted(os.listdir(folder))
        except OSError:  # not there yet, or not to be read
            names = []
        written = [name for name in names if name.startswith(("metrics", "monitor")) and name.endswith(".jsonl")]
        marks = tuple(_mark(folder / name) for name in written)
        before = self._files.get(folder)
        if before is None or before.marks != marks:
            before = _Files(marks, read_progress(folder, self._run_lines), tuple(newest_samples(folder)))
            self._files[folder] = before
        return before.progress, before.nodes

    def _limit(self, entry: Entry) -> int | None:
        """Return the time limit at submission, if no scheduler gives the present one."""
        if entry.run_dir not in self._limits:
            try:
                self._limits[entry.run_dir] = read_job_manifest(Path(entry.run_dir)).job.time_limit_s
            except HpcJobsError:  # the limit is one more thing that is not known of this folder
                self._limits[entry.run_dir] = None
        return self._limits[entry.run_dir]


def _group_of(entry: Entry) -> Group:
    """Return the group of a job: the sweep of a chunk, or the job or array itself."""
    chunks = Path(entry.run_dir).parent
    if chunks.name == "chunks" and chunks.parent.name.startswith("sweep-"):
        return Group(str(chunks.parent), "sweep", chunks.parent.name.removeprefix("sweep-"), entry.site)
    return Group(f"{entry.run_dir} {entry.job_id}", entry.job_id, entry.name, entry.site)


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:  # not there, or not there any more
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _rarely_accounting(connect: Connect, clock: Callable[[], float]) -> ConnectQueue:
    """Schedulers that are asked for the accounting of the same job at most every `ACCOUNT_S`."""

    @cache
    def connect_once(kind: str, conf: str | None) -> JobQueue:
        return _RarelyAccounting(connect(kind, conf), clock)

    return connect_once


class _RarelyAccounting:
    def __init__(self, scheduler: JobQueue, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._answers: dict[str, tuple[float, list[JobRecord]]] = {}
        self.submit, self.cancel, self.find_submitted = scheduler.submit, scheduler.cancel, scheduler.find_submitted
        self.queue, self.show_jobs = scheduler.queue, scheduler.show_jobs

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """The records of these jobs, some of them as old as `ACCOUNT_S`."""
        now, ids = self._clock(), list(job_ids)
        due = [job_id for job_id in ids if now - self._answers.get(job_id, (0.0, []))[0] >= ACCOUNT_S]
        records = self._scheduler.account(due) if due else []
        for job_id in due:
            own = [record for record in records if parent_id(record.job_id) == parent_id(job_id)]
            self._answers[job_id] = (now, own)
        return list(dict.fromkeys(record for job_id in ids for record in self._answers[job_id][1]))
