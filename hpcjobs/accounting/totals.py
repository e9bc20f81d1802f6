"""Sums figures over jobs by group, one day of the accounting at a time: all jobs may not fit into memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import polars as pl

from hpcjobs.accounting.columns import Doubts
from hpcjobs.accounting.derive import JOB_KEY, PUT_BACK, REQUEUE_S, known_sum
from hpcjobs.accounting.sources import AccountingTable, JobFilter, filter_jobs, gather, query_attempts
from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.units import walltime_s

GROUPS: Final = ("user", "account", "partition", "qos", "state", "name", "day", "source")
_FAILED: Final = (
    *("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)
_CPU_SECONDS: Final = pl.col("cpus") * pl.col("elapsed_s")
_COUNTS: Final = {
    "jobs": pl.len().cast(pl.Int64),
    "failed": pl.col("state").is_in(_FAILED).sum().cast(pl.Int64),
    "waited": pl.col("queue_wait_s").count().cast(pl.Int64),
}
_SUMS: Final = {
    "cpu_s": pl.col("cpu_s"),
    "cpu_asked_s": _CPU_SECONDS.filter(pl.col("cpu_s").is_not_null()),
    "cpu_alloc_s": _CPU_SECONDS,
    "gpu_alloc_s": pl.col("gpus") * pl.col("elapsed_s"),
    "mem_used_byte_s": pl.col("mem_used_bytes").cast(pl.Float64) * pl.col("elapsed_s"),
    "mem_asked_byte_s": (pl.col("mem_requested_bytes").cast(pl.Float64) * pl.col("elapsed_s")).filter(
        pl.col("mem_used_bytes").is_not_null()
    ),
    "wait_s": pl.col("queue_wait_s"),
    "lost_s": pl.col("lost_s"),
    "energy_j": pl.col("energy_j"),
    "not_measured_j": pl.col("energy_j").filter(pl.col("energy_source") != "measured"),
    "cost": pl.col("cost"),
}
_CURRENCY: Final = pl.col("currency").drop_nulls().first()
_OF_ATTEMPTS: Final = (*JOB_KEY, "state", "submitted", "ended")


def totals(frames: Iterable[pl.DataFrame], *, by: str | None = None) -> pl.DataFrame:
    """One row per group (or one in all): jobs, hours, efficiencies weighted by time, mean wait, energy, cost.

    Hours are CPU and GPU hours allocated; ``lost_h`` are hours of attempts that were requeued, which count as no
    job of their own. A sum covers the jobs with a known value, and is null without one.

    Args:
        frames: attempts in the order of their end.
    """
    key = _key(by)
    parts: list[pl.DataFrame] = []
    attempts = Attempts()
    for frame in frames:
        if len(frame):
            grouped = frame.with_columns(key.alias("group"))
            sums = {name: known_sum(column) for name, column in _SUMS.items()}
            parts.append(grouped.group_by("group").agg(**_COUNTS, **sums, currency=_CURRENCY))
            attempts.add(grouped)
    if not parts:
        return pl.DataFrame()
    every = pl.concat([*parts, _taken_off(attempts.put_back(), parts[0].schema)], how="vertical")
    added = {name: known_sum(pl.col(name)) for name in (*_COUNTS, *_SUMS)}
    summed = every.group_by("group").agg(**added, currency=_CURRENCY)
    return summed.select(
        pl.col("group").alias(by or "all"),
        "jobs",
        "failed",
        cpu_h=pl.col("cpu_alloc_s") / 3600,
        gpu_h=pl.col("gpu_alloc_s") / 3600,
        cpu_efficiency=pl.when(pl.col("cpu_asked_s") > 0).then(pl.col("cpu_s") / pl.col("cpu_asked_s")),
        mem_efficiency=pl.when(pl.col("mem_asked_byte_s") > 0).then(
            pl.col("mem_used_byte_s") / pl.col("mem_asked_byte_s")
        ),
        mean_wait_s=pl.when(pl.col("waited") > 0).then(pl.col("wait_s") / pl.col("waited")),
        lost_h=pl.col("lost_s") / 3600,
        energy_kwh=pl.col("energy_j") / 3.6e6,
        energy_source=pl.when(pl.col("not_measured_j").is_not_null())
        .then(pl.lit("modelled"))
        .when(pl.col("energy_j").is_not_null())
        .then(pl.lit("measured")),
        cost="cost",
        currency="currency",
    ).sort("cpu_h", descending=True, nulls_last=True)


class Attempts:
    """The few attempts after which Slurm may have put the job back, and later ones of the same jobs."""

    def __init__(self) -> None:
        self._may_be_put_back: list[pl.DataFrame] = []
        self._later: list[pl.DataFrame] = []
        self._ids: set[str] = set()

    def add(self, frame: pl.DataFrame) -> None:
        """Keep the attempts of ``frame`` that matter. Frames come in the order of their ends."""
        rows = frame.select("group", *_OF_ATTEMPTS)
        ended = rows.filter(pl.col("state").is_in(PUT_BACK))
        self._ids |= set(ended["job_id"].drop_nulls())
        self._may_be_put_back.append(ended)
        if self._ids:
            self._later.append(rows.filter(pl.col("job_id").is_in(list(self._ids))))

    def put_back(self) -> pl.DataFrame:
        """The attempts that another one of the same job followed: group and state."""
        first = pl.concat(self._may_be_put_back).with_row_index("_row")
        if not self._later:
            return first.select("group", "state")
        next_ones = pl.concat(self._later).select(*JOB_KEY, next_submitted="submitted")
        pairs = first.join(next_ones, on=JOB_KEY, how="left", nulls_equal=True)
        after = pl.col("next_submitted") - pl.col("submitted")
        soon = pl.col("next_submitted") <= pl.col("ended") + REQUEUE_S
        followed = pairs.filter((after > 0) & soon)["_row"].unique()
        # REQUEUED is on its way back, whether or not its next attempt is among the rows.
        return first.filter(pl.col("_row").is_in(followed.implode()) | (pl.col("state") == "REQUEUED")).select(
            "group", "state"
        )


def _taken_off(put_back: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    """Counts to subtract: a requeued attempt is neither a job nor a failure."""
    minus = put_back.group_by("group").agg(
        jobs=-pl.len().cast(pl.Int64), failed=-pl.col("state").is_in(_FAILED).sum().cast(pl.Int64)
    )
    return minus.select(
        pl.col(name).cast(kind) if name in minus.columns else pl.lit(None, dtype=kind).alias(name)
        for name, kind in schema.items()
    )


def _key(by: str | None) -> pl.Expr:
    if by is None:
        return pl.lit("all")
    if by == "day":
        return pl.col("ended").map_batches(_local_days, return_dtype=pl.String).fill_null("not ended")
    return pl.col(by).fill_null("-")


def _local_days(moments: pl.Series) -> pl.Series:
    """The local date of each moment; every time zone is a multiple of 15 minutes away from UTC."""
    quarters = moments // 900 * 900
    known = quarters.unique().drop_nulls().to_list()
    days = [datetime.fromtimestamp(quarter).strftime("%Y-%m-%d") for quarter in known]
    dates: pl.Series = quarters.replace_strict(known, days, default=None, return_dtype=pl.String)
    return dates


def parse_since(since: str | float) -> float:
    """Seconds since 1970, from ``7d`` (back from now) or from a number.

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
            days = (filter_jobs(frame, job_filter) for frame in query_attempts(job_filter, jobs_site, doubts))
            return AccountingTable(totals(days, by=by), doubts.by_frequency(), [])
        except SchedulerError:
            pass  # gather reports the reason and asks the other sources
    table = gather(job_filter, site=jobs_site)
    return table._replace(jobs=totals([table.attempts], by=by))
