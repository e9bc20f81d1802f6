"""Which jobs a report is about."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from datetime import date, datetime
from typing import NamedTuple

from hpcjobs.errors import RequestError, nearest
from hpcjobs.scheduler.base import State
from hpcjobs.units import walltime_s


class JobFilter(NamedTuple):
    """Which jobs a report is about. None: not restricted."""

    since: float
    """Jobs that ended since then (seconds since 1970), and jobs that have not ended."""
    until: float | None = None
    users: tuple[str, ...] | None = None
    account: str | None = None
    states: tuple[str, ...] | None = None
    name: str | None = None
    """Shell pattern over job names."""
    job_ids: tuple[str, ...] | None = None
    """These jobs, whenever they ran."""
    cluster: str | None = None
    """Cluster of the site's slurmdbd, several with commas, or ``all``; default the site's own."""


Moment = str | float | date


def parse_moment(option: str, moment: Moment) -> float:
    """Seconds since 1970, from ``7d`` (back from now), a local date (``2026-11-01``, ``2026-11-01T12:00``) or a number.

    A date or datetime without a time zone is local, also one of pandas.

    Raises:
        RequestError: none of these.
    """
    try:
        return _seconds(moment)
    except (TypeError, ValueError, OverflowError) as error:
        hint = "write how long ago: 7d, 12h or 30m; or a date: 2026-11-01"
        raise RequestError(f"{option} {moment}: not a time", hint=hint) from error


def _seconds(moment: Moment) -> float:
    if isinstance(moment, datetime):  # pandas counts a naive one as UTC
        return datetime.combine(moment.date(), moment.time(), moment.tzinfo).timestamp()
    if isinstance(moment, date):
        return datetime(moment.year, moment.month, moment.day).timestamp()
    if isinstance(moment, str) and len(moment) >= 10 and moment[4:5] == "-":
        return datetime.fromisoformat(moment).timestamp()
    seconds = time.time() - walltime_s(moment) if isinstance(moment, str) else float(moment)
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    return seconds


def check_states(option: str, states: Iterable[str]) -> None:
    """Raises RequestError if one is no state of a job."""
    for state in states:
        if state.upper() not in State.__members__:
            raise RequestError(f"{option} {state}: not a job state", hint=nearest(state.upper(), State.__members__))
