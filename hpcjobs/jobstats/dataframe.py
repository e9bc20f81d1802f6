"""The accounting as a pandas DataFrame, for notebooks and scripts."""

from __future__ import annotations

from typing import Any

import pandas as pd
import polars as pl

from hpcjobs.jobstats.columns import COLUMNS
from hpcjobs.jobstats.sources import JobFilter, gather
from hpcjobs.jobstats.totals import parse_since
from hpcjobs.site.models import Site

_REPEATING = (
    "user",
    "account",
    "partition",
    "qos",
    "state",
    "gpu_source",
    "energy_source",
    "currency",
    "goodput_source",
    "source",
    "site",
)


def read_jobs(
    *,
    site: str | Site | None = None,
    since: str | float = "7d",
    until: float | None = None,
    users: list[str] | None = None,
    account: str | None = None,
    states: list[str] | None = None,
    name: str | None = None,
    jobs: list[str] | None = None,
) -> pd.DataFrame:
    """Jobs of a site, one row each, with the columns of `columns.COLUMNS`.

    Args:
        since: a span (``7d``, ``12h``) back from now, or seconds since 1970; jobs that ended since then, and
            jobs that have not ended.
        until: seconds since 1970; jobs submitted before.
        users: their names; default everybody's that sacct shows.
        name: shell pattern over job names.
        jobs: these ids, whenever they ran.

    Doubtful rows are in ``frame.attrs["doubts"]`` (kind, rows, examples), fallbacks in ``attrs["notes"]``.

    Raises:
        ConfigError: no such site. SchedulerError: neither sacct nor the queue answers.
    """
    table = gather(
        JobFilter(
            since=parse_since(since),
            until=until,
            users=None if users is None else tuple(users),
            account=account,
            states=None if states is None else tuple(states),
            name=name,
            job_ids=None if jobs is None else tuple(jobs),
        ),
        site=site,
    )
    frame = to_pandas(table.jobs)
    frame.attrs["doubts"] = [doubt._asdict() for doubt in table.doubts]
    frame.attrs["notes"] = table.notes
    return frame


def to_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    """Nullable integers, UTC times, categories for texts that repeat; without going through pyarrow."""
    pandas_frame: pd.DataFrame = pd.DataFrame({name: _series(frame[name]) for name in frame.columns})
    return pandas_frame


def _series(column: pl.Series) -> pd.Series[Any]:
    kind = COLUMNS[column.name][0] if column.name in COLUMNS else None
    converted: pd.Series[Any]
    if kind == "time":
        converted = pd.to_datetime(pd.Series(column.cast(pl.Float64).to_numpy()), unit="s", utc=True)
    elif column.dtype.is_integer():
        values, missing = column.fill_null(0).to_numpy(), column.is_null().to_numpy()
        converted = pd.Series(pd.arrays.IntegerArray(values.copy(), missing.copy()))
    elif column.dtype.is_float():
        converted = pd.Series(column.to_numpy())
    else:
        converted = pd.Series(column.to_list(), dtype="str")
    return converted.astype("category") if column.name in _REPEATING else converted
