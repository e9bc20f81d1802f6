"""Which jobs a report is about."""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple

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

    @property
    def names_clusters(self) -> bool:
        """Whether jobs may be of another cluster than the site's."""
        return self.cluster is not None


def parse_moment(moment: str | float) -> float:
    """Seconds since 1970, from ``7d`` (back from now), a local date (``2026-11-01``, ``2026-11-01T12:00``) or a number.

    Raises:
        ValueError: none of these.
    """
    if not isinstance(moment, str):
        return moment
    if len(moment) >= 10 and moment[4:5] == "-":
        return datetime.fromisoformat(moment).timestamp()
    return time.time() - walltime_s(moment)
