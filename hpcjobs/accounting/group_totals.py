"""Sums over jobs without holding them: one day of the accounting after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import polars as pl

from hpcjobs.accounting.doubts import Doubts
from hpcjobs.accounting.sources import Gathered, Wanted, chunks, gather, restricted
from hpcjobs.accounting.totals import GROUPS, totals
from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.units import walltime_s


def moment(since: str | float) -> float:
    """``7d`` back from now, or seconds since 1970 as they are.

    Raises:
        ValueError: neither.
    """
    return time.time() - walltime_s(since) if isinstance(since, str) else since


def sums(wanted: Wanted, *, by: str, site: str | Site | None = None) -> Gathered:
    """`totals.totals` of the jobs, by ``by``; attempts of a requeued job count where they ended.

    Raises:
        RequestError: no such grouping. SchedulerError: nobody answers.
    """
    if by not in GROUPS:
        raise RequestError(f"--by {by} is not known", hint=nearest(by, GROUPS))
    where = site if isinstance(site, Site) else load_site(site or default_site())
    doubts = Doubts()
    if where.scheduler == "slurm":
        try:
            return Gathered(totals(_days(wanted, where, doubts), by=by), doubts.by_frequency(), [])
        except SchedulerError:
            pass  # gather says why, and asks the others
    found = gather(wanted, site=where)
    return found._replace(jobs=totals([found.jobs], by=by))


def _days(wanted: Wanted, site: Site, doubts: Doubts) -> Iterator[pl.DataFrame]:
    for frame in chunks(wanted, site, doubts):
        yield restricted(frame, wanted)
