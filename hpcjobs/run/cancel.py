"""Cancelling jobs, and which of them had ended before."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import NamedTuple

from hpcjobs.run.identity import require_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.select import require_all_own
from hpcjobs.run.status import Connect, Known, statuses
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.connect import connect


class Cancelled(NamedTuple):
    """What became of the jobs that were to be cancelled: each is in one of the three."""

    cancelled: list[str]
    """Scheduler's ids of jobs that were alive."""
    ended: dict[str, State]
    """Jobs that had ended before, and how."""
    unknown: list[str]
    """Jobs that the scheduler does not know (any more)."""


def cancel(entries: Iterable[Entry], *, only: Collection[State] = (), connect: Connect = connect) -> Cancelled:
    """End those of ``entries`` that have not ended; one queue query and one cancelling command per scheduler.

    ``only``: those in one of these states, task by task of an array; none: whatever their state.

    The queue is asked first because an id alone may be another job's by now.

    Raises:
        RequestError: one of them belongs to another host, cluster or user; then none is cancelled.
        SchedulerError: it does not answer, or refuses.
    """
    outcome = Cancelled([], {}, [])
    chosen = sorted(entries, key=_where)
    require_reachable(chosen)
    for (kind, conf), group in groupby(statuses(chosen, connect=connect), key=lambda known: _where(known.entry)):
        alive = [known for known in group if _alive(known, outcome)]
        require_all_own(alive)
        ids = [job_id for known in alive for job_id in known.ids(only)]
        if ids:
            connect(kind, conf or None).cancel(ids)
            outcome.cancelled.extend(ids)
            _record_ends([known.entry for known in alive if _waits(known)], connect)
    return outcome


def _waits(known: Known) -> bool:
    return all(record.state is State.PENDING for record in known.records)


def _record_ends(entries: list[Entry], connect: Connect) -> None:
    """Ask once more about jobs that waited: they write no end themselves, and without accounting slurmctld alone
    knows it, for some minutes."""
    if entries:
        statuses(entries, connect=connect, errors=[])


def _where(entry: Entry) -> tuple[str, str]:
    return entry.scheduler, entry.slurm_conf or ""


def _alive(known: Known, outcome: Cancelled) -> bool:
    """Whether there is something to cancel; if not, the reason is added to ``outcome``."""
    states = [record.state for record in known.records]
    if any(not state.ended and state is not State.UNKNOWN for state in states):
        return True
    if all(state.ended for state in states):
        outcome.ended[known.ids()[0]] = next((s for s in states if s is not State.COMPLETED), State.COMPLETED)
    else:
        outcome.unknown.extend(known.ids())
    return False
