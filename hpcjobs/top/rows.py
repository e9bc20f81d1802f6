"""Turns a snapshot into the rows of the screen: arrays and sweeps folded, sorted, filtered. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcjobs.run.index import Entry
from hpcjobs.run.progress import NodeSample, Progress
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.units import count_tasks


class Group(NamedTuple):
    """The job, array or sweep that a record belongs to."""

    key: str
    job: str
    """Text of the first column: an id, or `sweep`."""
    name: str
    site: str | None
    run_dir: str | None = None


class Task(NamedTuple):
    """One record, and the content of the job's files."""

    group: Group
    record: JobRecord
    entry: Entry | None
    """None: it was submitted by other means."""
    progress: Progress | None = None
    nodes: tuple[NodeSample, ...] = ()
    alarms: tuple[str, ...] = ()


class Snapshot(NamedTuple):
    """All tasks, in the order of submission."""

    tasks: tuple[Task, ...]
    errors: tuple[str, ...]
    """Failures of schedulers, and warnings."""
    taken: float
    """Seconds since 1970."""

    def changes_from(self, before: Snapshot | None) -> bool:
        """Whether a job has come, gone, or is in another state."""
        return before is None or self._states() != before._states()

    def _states(self) -> list[tuple[str, str, str, str | None]]:
        return [(t.group.key, t.record.job_id, t.record.state.value, t.record.reason) for t in self.tasks]


SORTS = ("state", "newest", "name", "progress", "time left")
"""Orders of rows; the first one is the default."""
_ORDER = (State.RUNNING, State.COMPLETING, State.SUSPENDED, State.STOPPED, State.CONFIGURING, State.PENDING)


class View(NamedTuple):
    """The user's choices on the screen."""

    sort: str = SORTS[0]
    text: str = ""
    """Only rows with this text in id, name, site, state, nodes or reason; empty: all."""
    unfolded: frozenset[str] = frozenset()


class JobRow(NamedTuple):
    """One line: a job, a task of an unfolded array, or a folded array or sweep."""

    key: str
    group: Group
    job: str
    tasks: tuple[Task, ...]
    state: State
    """The most important state: a failure, then running, then waiting."""
    counts: tuple[tuple[State, int], ...]
    """How many tasks are in each state."""
    share: float | None
    """Completed share, 0 to 1: of the steps, of the tasks, or of the time limit."""
    share_of: str
    """``steps``, ``tasks`` or ``limit``."""
    left_s: float | None
    """Seconds until the last step, or until the time limit."""
    inside: bool = False
    """A task below the row of its array."""

    @property
    def first(self) -> Task:
        """The task that represents the row: a failed one, or a living one."""
        return _most_telling(self.tasks)

    @property
    def folds(self) -> bool:
        """Whether the row stands for several tasks."""
        return len(self.tasks) > 1 or count_tasks(self.tasks[0].record.job_id) > 1

    @property
    def nodes(self) -> tuple[NodeSample, ...]:
        return tuple(node for task in self.tasks for node in task.nodes)

    @property
    def alarms(self) -> tuple[str, ...]:
        return tuple(alarm for task in self.tasks for alarm in task.alarms)


def make_rows(snapshot: Snapshot, view: View) -> list[JobRow]:
    """The rows to show, in their order; the tasks of an unfolded group follow its row."""
    groups: dict[str, list[Task]] = {}
    for task in snapshot.tasks:
        groups.setdefault(task.group.key, []).append(task)
    rows = []
    for row in _sort([fold(tasks) for tasks in groups.values()], view.sort):
        if not _matches(row, view.text):
            continue
        rows.append(row)
        if row.folds and row.key in view.unfolded:
            rows += [make_row(task, inside=True) for task in sorted(row.tasks, key=_number)]
    return rows


def fold(tasks: Sequence[Task]) -> JobRow:
    """Return one row for the tasks of a job, array or sweep."""
    if len(tasks) == 1 and count_tasks(tasks[0].record.job_id) == 1:
        return make_row(tasks[0])
    counts = count_states(tasks)
    total, ended = sum(n for _, n in counts), sum(n for state, n in counts if state.ended)
    rows = [_by_steps(task) for task in tasks if not task.record.state.ended]
    inner = [row.share or 0.0 for row in rows]
    left = [row.left_s for row in rows if row.left_s is not None]
    waiting = any(state is State.PENDING for state, _ in counts)
    group = tasks[0].group
    return JobRow(
        key=group.key,
        group=group,
        job=group.job,
        tasks=tuple(tasks),
        state=_most_telling(tasks).record.state,
        counts=counts,
        share=(ended + sum(inner)) / total,
        share_of="tasks",
        left_s=max(left) if left and not waiting else None,
    )


def make_row(task: Task, *, inside: bool = False) -> JobRow:
    """Return the row of one task; ``inside``: below the row of its array."""
    record = task.record
    row = _by_steps(task)
    if row.share is None and record.time_limit_s and record.elapsed_s is not None:
        left = max(0.0, record.time_limit_s - record.elapsed_s)
        row = row._replace(share=min(1.0, record.elapsed_s / record.time_limit_s), share_of="limit", left_s=left)
    return row._replace(key=f"{task.group.key} {record.job_id}" if inside else task.group.key, inside=inside)


def _number(task: Task) -> list[int]:
    """The job's number and the first of its array; Slurm lists tasks by priority."""
    return [int(digits) for digits in re.findall(r"\d+", task.record.job_id)[:2]]


def _by_steps(task: Task) -> JobRow:
    progress, record = task.progress, task.record
    share = progress.share if progress is not None else None
    return JobRow(
        key=task.group.key,
        group=task.group,
        job=record.job_id,
        tasks=(task,),
        state=record.state,
        counts=count_states([task]),
        share=1.0 if record.state is State.COMPLETED else share,
        share_of="steps",
        left_s=progress.remaining_s if progress is not None and record.state is State.RUNNING else None,
    )


def count_states(tasks: Iterable[Task]) -> tuple[tuple[State, int], ...]:
    """How many jobs and array tasks are in each state, the living first."""
    counts = Counter[State]()
    for task in tasks:
        counts[task.record.state] += count_tasks(task.record.job_id)
    return tuple(sorted(counts.items(), key=lambda item: _rank(item[0])))


def _rank(state: State) -> int:
    """Rank running jobs first, then waiting ones, then ended ones."""
    if state in _ORDER:
        return _ORDER.index(state)
    return len(_ORDER) + (state is State.COMPLETED) if state.ended else len(_ORDER) - 1


def _most_telling(tasks: Sequence[Task]) -> Task:
    """Return a failed task, or the first by `_rank`."""
    failed = [t for t in tasks if t.record.state.ended and t.record.state is not State.COMPLETED]
    return failed[0] if failed else min(tasks, key=lambda task: _rank(task.record.state))


def _matches(row: JobRow, text: str) -> bool:
    group = row.group
    texts = [group.job, group.name, group.site, *(state.value for state, _ in row.counts)]
    for record in (task.record for task in row.tasks):
        texts += [record.job_id, record.node_list, record.reason, record.partition]
    return any(text.lower() in candidate.lower() for candidate in texts if candidate)


def _sort(rows: list[JobRow], by: str) -> list[JobRow]:
    def submit_time(row: JobRow) -> float:
        record = row.tasks[0].record
        return record.submitted or record.started or 0.0

    newest = sorted(rows, key=submit_time, reverse=True)
    if by == "name":
        return sorted(newest, key=lambda row: row.group.name)
    if by == "progress":
        return sorted(newest, key=lambda row: -1.0 if row.share is None else row.share, reverse=True)
    if by == "time left":
        return sorted(newest, key=lambda row: float("inf") if row.left_s is None else row.left_s)
    if by == "state":
        return sorted(newest, key=lambda row: min(_rank(state) for state, _ in row.counts))
    return newest
