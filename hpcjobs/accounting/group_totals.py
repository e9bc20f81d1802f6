"""Sums jobs by group, one day of the accounting at a time, so that memory never holds all jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import polars as pl

from hpcjobs.accounting.doubts import Doubts
from hpcjobs.accounting.sources import AccountingTable, JobFilter, filter_jobs, gather, query_attempts
from hpcjobs.accounting.totals import GROUPS, totals
from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.units import walltime_s


def parse_since(since: str | float) -> float:
    """``7d`` back from now, or seconds since 1970 as they are.

    Raises:
        ValueError: neither.
    """
    return time.time() - walltime_s(since) if isinstance(since, str) else since


def sum_by_group(job_filter: JobFilter, *, by: str, site: str | Site | None = None) -> AccountingTable:
    """`totals.totals` of the jobs, by ``by``; attempts of a requeued job count where they ended.

    Raises:
        RequestError: no such grouping. SchedulerError: no site answers.
    """
    if by not in GROUPS:
        raise RequestError(f"--by {by}: no such group", hint=nearest(by, GROUPS))
    jobs_site = site if isinstance(site, Site) else load_site(site or default_site())
    doubts = Doubts()
    if jobs_site.scheduler == "slurm":
        try:
            return AccountingTable(totals(_days(job_filter, jobs_site, doubts), by=by), doubts.by_frequency(), [])
        except SchedulerError:
            pass  # gather says why, and asks the others
    table = gather(job_filter, site=jobs_site)
    return table._replace(jobs=totals([table.attempts], by=by))


def _days(job_filter: JobFilter, site: Site, doubts: Doubts) -> Iterator[pl.DataFrame]:
    for frame in query_attempts(job_filter, site, doubts):
        yield filter_jobs(frame, job_filter)
