"""Resolves dependencies on jobs that are named as everywhere else: by id, name or run folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcjobs.errors import RequestError, UnknownJobError
from hpcjobs.run.attempts import current_id
from hpcjobs.run.identity import require_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.select import select
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import Known, statuses
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


def require_possible(jobs: Mapping[str, Sequence[str]], *, site: str | None = None) -> None:
    """Refuse a dependency on jobs that have ended otherwise: slurmctld starts a job at once that depends on one which
    it has forgotten, some minutes after its end (MinJobAge).

    Raises:
        RequestError: one of ``jobs``, by kind (``afterok``), has ended in a way that the kind excludes.
    """
    for kind in ("afterok", "afternotok"):
        texts = [text for text in jobs.get(kind, ()) if not _DELAY.match(text)]
        for known in statuses(select(texts, site=site)) if texts else ():
            if (end := _excluding_end(kind, known)) is not None:
                raise RequestError(
                    f"{_FLAGS[kind]} {known.entry.job_id}: {end}",
                    hint="--after-any starts the job whatever the end of the other; `hpcjobs rerun` repeats a run",
                )


def _excluding_end(kind: str, known: Known) -> str | None:
    """Why the job of ``known`` can never be what ``kind`` waits for; None: it can be, or is."""
    if not all(record.state.ended or record.source == "nobody" for record in known.records):
        return None
    others = [record.state for record in known.records if record.state is not State.COMPLETED]
    if kind == "afternotok":
        return None if others else "the job has COMPLETED, it will not fail"
    if not others:
        return None
    if others[0] is State.UNKNOWN:
        return "the scheduler does not know the job any more, and it wrote no end"
    return f"the job has ended, {others[0].value}; it will not succeed"


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
