"""The values that the screen shows at one moment."""

from __future__ import annotations

from typing import NamedTuple

from hpcjobs.run.index import Entry
from hpcjobs.run.progress import Progress
from hpcjobs.run.samples import NodeSample
from hpcjobs.scheduler.base import JobRecord


class Group(NamedTuple):
    """The job, array or sweep that a record belongs to."""

    key: str
    job: str
    """What the first column has: an id, or `sweep`."""
    name: str
    site: str | None


class Task(NamedTuple):
    """One record, and what the job's files say."""

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
    """What kept a scheduler from answering, and warnings."""
    taken: float
    """Seconds since 1970."""

    def changes_from(self, before: Snapshot | None) -> bool:
        """Whether a job has come, gone, or is in another state."""
        return before is None or self._states() != before._states()

    def _states(self) -> list[tuple[str, str, str, str | None]]:
        return [(t.group.key, t.record.job_id, t.record.state.value, t.record.reason) for t in self.tasks]
