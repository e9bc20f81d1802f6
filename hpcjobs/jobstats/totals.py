"""Sums figures over jobs by group, one day of the accounting at a time: all jobs may not fit into memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import polars as pl

from hpcjobs.errors import RequestError, SchedulerError, nearest
from hpcjobs.jobstats.cache import Window, days, following, query_folder, read_parquet, write_parquet
from hpcjobs.jobstats.columns import Doubts, JobFilter
from hpcjobs.jobstats.derive import JOB_KEY, MEASURED_J, NO_JOB, PUT_BACK, REQUEUE_S, derive, divide, known_sum
from hpcjobs.jobstats.sources import AccountingTable, filter_jobs, gather, open_sacct
from hpcjobs.jobstats.usage import add_running_usage
from hpcjobs.site.library import site_or_cluster
from hpcjobs.site.models import Site

GROUPS: Final = ("user", "account", "partition", "qos", "state", "name", "day", "source", "cluster")
_FAILED: Final = (
    *("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)


def _byte_seconds(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.Float64) * pl.col("elapsed_s")


_CPU_SECONDS: Final = pl.col("cpus") * pl.col("elapsed_s")
_WAITS: Final = pl.col("queue_wait_s").filter(pl.col("state") != "REVOKED")
_COUNTS: Final = {
    "jobs": pl.len().cast(pl.Int64),
    "failed": pl.col("state").is_in(_FAILED).sum().cast(pl.Int64),
    "waited": _WAITS.count().cast(pl.Int64),
}
_SUMS: Final = {
    "cpu_s": pl.col("cpu_s").filter(_CPU_SECONDS > 0),  # as in the efficiency of each job
    "cpu_asked_s": _CPU_SECONDS.filter(pl.col("cpu_s").is_not_null()),
    "cpu_alloc_s": _CPU_SECONDS,
    "gpu_alloc_s": pl.col("gpus") * pl.col("elapsed_s"),
    # As in the efficiency of each job: of jobs for which both are known.
    "mem_used_byte_s": _byte_seconds("mem_used_bytes").filter(pl.col("mem_requested_bytes") > 0),
    "mem_asked_byte_s": _byte_seconds("mem_requested_bytes").filter(pl.col("mem_used_bytes").is_not_null()),
    "wait_s": _WAITS,
    "lost_s": pl.col("lost_s"),
    "energy_j": pl.col("energy_j"),
    "not_measured_j": pl.col("energy_j").filter(pl.col("energy_source") != "measured"),
    "cost": pl.col("cost"),
}
_CURRENCY: Final = pl.col("currency").drop_nulls().first()
_OF_ATTEMPTS: Final = (*JOB_KEY, "state", "submitted", "ended")
NEEDED: Final = frozenset(
    (
        *(*JOB_KEY, *GROUPS, "submitted", "ended", "elapsed_s", "queue_wait_s", "cpus", "gpus", "nodes"),
        *("cpu_s", "max_rss_bytes", "mem_used_bytes", "mem_requested_bytes", MEASURED_J),
        *("_ended_steps_cpu_s", "_ended_steps_mem_bytes", "_ended_steps_rss_bytes"),
    )
)
"""Columns of attempts that the sums need."""


_BEGIN, _END, _SINCE = "_begin", "_end", "_since"


class Sums(NamedTuple):
    """Sums over attempts by group, and the few attempts that may be no jobs of their own."""

    groups: pl.DataFrame
    put_back: pl.DataFrame
    """Attempts after which Slurm may have put the job back into the queue."""
    later: pl.DataFrame
    """Attempts of jobs that may have been put back before."""


class Summing:
    """Sums of frames of attempts, which come in the order of their end."""

    def __init__(self, by: Sequence[str]) -> None:
        self.by = tuple(by)
        self._ids: set[str] = set()

    def sums(self, frame: pl.DataFrame) -> Sums:
        grouped = frame.with_columns(
            _key(name).alias(column) for name, column in zip(self.by, self.columns, strict=True)
        )
        sums = {name: known_sum(column) for name, column in _SUMS.items()}
        groups = grouped.group_by(self.columns).agg(**_COUNTS, **sums, currency=_CURRENCY)
        rows = grouped.lazy().select(*self.columns, *_OF_ATTEMPTS)
        put_back = rows.filter(pl.col("state").is_in([*PUT_BACK, *NO_JOB])).collect()
        self.remember(put_back)
        later = rows.filter(pl.col("job_id").is_in(list(self._ids))) if self._ids else rows.clear()
        return Sums(groups, put_back, later.collect())

    def remember(self, put_back: pl.DataFrame) -> None:
        """Attempts that may have been put back: later ones of these jobs matter."""
        self._ids |= set(put_back["job_id"].drop_nulls())

    @property
    def columns(self) -> list[str]:
        """Columns of the groups."""
        return [f"_by{number}" for number in range(len(self.by))]

    def total(self, parts: Iterable[Sums]) -> pl.DataFrame:
        """One row per group; see `totals`."""
        every = list(parts)
        if not every:
            return pl.DataFrame()
        by_day = [name for name in self.by if name == "day"]
        added = {name: known_sum(pl.col(name)) for name in (*_COUNTS, *_SUMS)}
        rows = pl.concat([*(part.groups for part in every), _taken_off(every, self.columns)], how="vertical")
        return (
            rows.group_by(self.columns)
            .agg(**added, currency=_CURRENCY)
            .select(
                *(pl.col(column).alias(name) for name, column in zip(self.by, self.columns, strict=True)),
                "jobs",
                "failed",
                cpu_h=pl.col("cpu_alloc_s") / 3600,
                gpu_h=pl.col("gpu_alloc_s") / 3600,
                cpu_efficiency=divide(pl.col("cpu_s"), pl.col("cpu_asked_s")),
                mem_efficiency=divide(pl.col("mem_used_byte_s"), pl.col("mem_asked_byte_s")),
                mean_wait_s=divide(pl.col("wait_s"), pl.col("waited")),
                lost_h=pl.col("lost_s") / 3600,
                energy_kwh=pl.col("energy_j") / 3.6e6,
                energy_source=pl.when(pl.col("not_measured_j").is_not_null())
                .then(pl.lit("modelled"))
                .when(pl.col("energy_j").is_not_null())
                .then(pl.lit("measured")),
                cost="cost",
                currency="currency",
            )
            .sort([*by_day, "cpu_h"], descending=[*(False for _ in by_day), True], nulls_last=True)
        )


def totals(frames: Iterable[pl.DataFrame], *, by: str | Sequence[str] = "all") -> pl.DataFrame:
    """One row per group: jobs, hours, efficiencies weighted by time, mean wait, energy, cost; the day first in order.

    Hours are CPU and GPU hours allocated; ``lost_h`` are hours of attempts that were requeued, which count as no
    job of their own. A sum covers the jobs with a known value, and is null without one.

    Args:
        frames: attempts in the order of their end.
    """
    summing = Summing([by] if isinstance(by, str) else by)
    return summing.total([summing.sums(frame) for frame in frames if len(frame)])


def _taken_off(parts: Sequence[Sums], columns: Sequence[str]) -> pl.DataFrame:
    """Counts to subtract: an attempt that another one of the same job followed is neither a job nor a failure."""
    first = pl.concat([part.put_back for part in parts]).with_row_index("_row")
    next_ones = pl.concat([part.later for part in parts]).select(*JOB_KEY, next_submitted="submitted")
    pairs = first.join(next_ones, on=JOB_KEY, how="left", nulls_equal=True)
    after = pl.col("next_submitted") - pl.col("submitted")
    soon = pl.col("next_submitted") <= pl.col("ended") + REQUEUE_S
    followed = pairs.filter((after > 0) & soon)["_row"].unique()
    # A row of NO_JOB is no job of its own, whether or not another one is among the rows.
    put_back = first.filter(pl.col("_row").is_in(followed.implode()) | pl.col("state").is_in(NO_JOB))
    minus = put_back.group_by(columns).agg(
        jobs=-pl.len().cast(pl.Int64), failed=-pl.col("state").is_in(_FAILED).sum().cast(pl.Int64)
    )
    return minus.select(
        pl.col(name).cast(kind) if name in minus.columns else pl.lit(None, dtype=kind).alias(name)
        for name, kind in parts[0].groups.schema.items()
    )


class SumStore:
    """Sums of closed windows in the user's cache folder: a file per field of `Sums`, with the windows of its rows.

    An attempt is known to follow another one only if the report has read the other one. So a window is kept with the
    begin of its report, and a report that begins earlier makes new sums. A window that the report's begin or end cuts
    is neither read nor kept.
    """

    def __init__(
        self,
        summing: Summing,
        since: int,
        prepare: Callable[[pl.DataFrame], pl.DataFrame],
        question: Sequence[str],
        *,
        cut: tuple[float, float],
    ) -> None:
        self._summing, self._since, self._prepare, self._cut = summing, since, prepare, cut
        self._paths = {name: query_folder("sums", *question) / f"{name}.parquet" for name in Sums._fields}
        self._closed: dict[Window, Sums] = {}
        self._known = 0
        if all(path.exists() for path in self._paths.values()):
            tables = [read_parquet(path).filter(pl.col(_SINCE) <= since) for path in self._paths.values()]
            parts = [table.partition_by(_BEGIN, _END, as_dict=True, include_key=False) for table in tables]
            nothing = [table.drop(_BEGIN, _END).clear() for table in tables]
            for begin, end in parts[0]:
                tables_of_window = (part.get((begin, end), none) for part, none in zip(parts, nothing, strict=True))
                self._closed[Window(begin, end)] = Sums(*(frame.drop(_SINCE) for frame in tables_of_window))
            self._known = len(self._closed)

    def windows(self, day: Window) -> list[Window]:
        windows = following(day, dict(iter(self._closed))) if day.begin >= self._cut[0] else []
        return [window for window in windows if window.end <= self._cut[1]]

    def read(self, window: Window) -> Sums:
        self._summing.remember(self._closed[window].put_back)
        return self._closed[window]

    def keep(self, window: Window | None, frame: pl.DataFrame) -> Sums:
        part = self._summing.sums(self._prepare(frame))
        if window is not None and window.begin >= self._cut[0] and window.end <= self._cut[1]:
            self._closed[window] = part
        return part

    def save(self) -> None:
        """Write the files, if sums of windows are new."""
        if len(self._closed) == self._known:
            return
        for name, path in self._paths.items():
            rows = [
                getattr(part, name).with_columns(
                    pl.lit(value, dtype=pl.Int64).alias(column)
                    for column, value in ((_BEGIN, window.begin), (_END, window.end), (_SINCE, self._since))
                )
                for window, part in self._closed.items()
            ]
            write_parquet(path, pl.concat(rows))


def _key(by: str) -> pl.Expr:
    if by == "all":
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


def sum_by_group(job_filter: JobFilter, *, by: Sequence[str], site: str | Site | None = None) -> AccountingTable:
    """`totals` of the jobs, by one or two groups; attempts of a requeued job count where they ended.

    Raises RequestError: no such grouping. SchedulerError: no site answers.
    """
    for name in by:
        if name not in GROUPS:
            raise RequestError(f"--by {name}: no such group", hint=nearest(name, GROUPS))
    jobs_site = site if isinstance(site, Site) else site_or_cluster(site)
    doubts, summing = Doubts(), Summing(by)
    if jobs_site.kind.has_accounting:
        try:
            return AccountingTable(_sum_sacct(job_filter, jobs_site, summing, doubts), doubts.by_frequency(), [])
        except SchedulerError:
            pass  # gather reports the reason and asks the other sources
    table = gather(job_filter, site=jobs_site)
    parts = [summing.sums(table.attempts)] if len(table.attempts) else []
    return table._replace(jobs=summing.total(parts))


def _sum_sacct(job_filter: JobFilter, site: Site, summing: Summing, doubts: Doubts) -> pl.DataFrame:
    def prepare(frame: pl.DataFrame) -> pl.DataFrame:
        return filter_jobs(derive(add_running_usage(frame, slurm_conf=site.slurm_conf), site), job_filter)

    sacct = open_sacct(job_filter, site)
    if job_filter.job_ids is not None:
        return summing.total([summing.sums(prepare(frame)) for frame in sacct.of_jobs(job_filter.job_ids, doubts)])
    first = next(days(job_filter.since, time.time()))
    chosen = (*job_filter._replace(since=first.begin, until=None), site.prices, site.watts, site.partitions)
    question = (*sacct.identity(), *summing.by, *time.tzname, repr(chosen))
    until = math.inf if job_filter.until is None else job_filter.until
    store = SumStore(summing, first.begin, prepare, question, cut=(job_filter.since, until))
    parts = list(sacct.parts(store, doubts, only=NEEDED))
    store.save()
    return summing.total(parts)
