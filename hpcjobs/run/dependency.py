"""Dependencies on jobs that are named as everywhere else: by id, name or run folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcjobs.errors import RequestError, UnknownJobError
from hpcjobs.run.attempts import current_id
from hpcjobs.run.identity import require_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.select import select
from hpcjobs.run.state_file import own_ids
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.units import walltime_s

_DELAY = re.compile(r"(?P<job>.+)\+(?P<delay>[0-9.]+[a-z0-9.]*)\Z")
_FLAGS = {"afterok": "--after", "afterany": "--after-any", "afternotok": "--after-fail"}
_NEVER = "DependencyNeverSatisfied"


def dependency_on(jobs: Mapping[str, Sequence[str]], *, site: str | None = None) -> str | None:
    """Slurm's dependency for ``jobs``, by kind (``afterok``); None: no job is named.

    ``JOB+10m`` is 10 minutes after that job has started, whatever the kind. Of a job that was resubmitted the current
    one is meant.

    Raises:
        UnknownJobError: a word names no job. RequestError: a job of another cluster, or no delay in whole minutes.
    """
    parts: list[str] = []
    for kind, arguments in jobs.items():
        plain: list[str] = []
        for text in arguments:
            match = _DELAY.match(text)
            try:
                ids = _ids(match["job"] if match else text, site)
            except UnknownJobError as error:
                raise UnknownJobError(f"{_FLAGS[kind]} {text}: {error.message}", hint=error.hint) from error
            if match:
                parts += [f"after:{job_id}+{_minutes(text, match['delay'])}" for job_id in ids]
            else:
                plain += ids
        if plain:
            parts.append(":".join([kind, *dict.fromkeys(plain)]))
    return ",".join(parts) or None


def _ids(text: str, site: str | None) -> list[str]:
    entries = select([text], site=site)
    require_reachable(entries)
    return [_current(entry) for entry in entries]


def _current(entry: Entry) -> str:
    return current_id(entry) if entry.task is None else own_ids(entry)[0]


def _minutes(text: str, delay: str) -> int:
    try:
        seconds = int(delay) * 60 if delay.isdecimal() else walltime_s(delay)
    except ValueError as error:
        raise RequestError(f"--after {text}: {error}", hint="10m, 2h, or a number of minutes") from error
    if seconds % 60:
        raise RequestError(f"--after {text}: Slurm counts the delay in minutes")
    return seconds // 60


def is_never_met(record: JobRecord) -> bool:
    """Whether the job waits for others in a way that they can no longer end: it stays in the queue until cancelled."""
    return record.state is State.PENDING and record.reason is not None and _NEVER in record.reason
