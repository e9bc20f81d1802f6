"""A submitted job in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcjobs.record.attempts import Attempt
from hpcjobs.record.metrics import read_lines
from hpcjobs.record.names import METRICS, SUMMARY
from hpcjobs.record.numbers import decode_object
from hpcjobs.record.summary import read_summary
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_attempts, read_usable
from hpcjobs.scheduler.base import JobRecord, State


class JobHandle:
    """One job, or one array: ``hpcjobs.submit`` returns it, ``hpcjobs.find(id)`` finds it again.

    Every submission makes one: its methods import modules that a submission does without.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, site={self.entry.site!r}, run_dir={self.entry.run_dir!r})"

    @property
    def id(self) -> str:
        """The scheduler's id."""
        return self.entry.job_id

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.entry.run_dir)

    @property
    def records(self) -> list[JobRecord]:
        """The current state: one record, or one per array task."""
        from hpcjobs.run.status import statuses

        return statuses([self.entry])[0].records

    @property
    def state(self) -> State:
        """The state now; of an array, the first state that is not COMPLETED."""
        states = [record.state for record in self.records]
        return next((state for state in states if state is not State.COMPLETED), states[0])

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the job has ended; its exit code.

        Raises:
            TimeoutError: ``timeout_s`` seconds have passed.
        """
        from hpcjobs.run import wait

        return wait.exit_code(wait.wait([self.entry], timeout_s=timeout_s))

    @property
    def attempts(self) -> list[Attempt]:
        """Each start of a job with ``retries``: its end, cause and decision; oldest first."""
        return read_attempts(self.run_dir)

    def cancel(self) -> None:
        """End the job; no error if it has ended."""
        from hpcjobs.run.control import cancel

        cancel([self.entry])

    def logs(self, *, rank: int | None = None) -> str:
        """The output of the job until now, or the output of one rank."""
        from hpcjobs.run import logs

        return "".join(logs.lines(self.entry, rank=rank))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; empty when the program writes none."""
        path = self.run_dir / METRICS
        return list(filter(None, map(decode_object, read_lines(path)))) if path.exists() else []

    def summary(self) -> dict[str, Any] | None:
        """summary.json; None when the program has not written one, or, with a warning, none that can be used."""
        path = self.run_dir / SUMMARY
        return read_usable(path, lambda: read_summary(path))


def find(name: str | int | Path, *, site: str | None = None) -> JobHandle:
    """The job that ``name`` stands for: an id, an array task, a run folder, or a name (the newest of that name).

    Raises:
        UnknownJobError: no job has this name. RequestError: two sites have given out this id.
    """
    from hpcjobs.run.select import select

    return JobHandle(select([str(name)], site=site)[0])
