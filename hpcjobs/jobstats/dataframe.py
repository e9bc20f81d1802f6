"""The accounting as a pandas DataFrame, for notebooks and scripts. Imports pandas when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcjobs.errors import require_packages
from hpcjobs.jobstats.columns import COLUMNS, JobFilter, check_states, parse_moment, unit_of

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from hpcjobs.jobstats.columns import Moment
    from hpcjobs.site.models import Site

_REPEATING = (
    *("user", "account", "partition", "qos", "state", "gpu_source", "energy_source", "currency", "goodput_source"),
    *("source", "site"),
)


def accounting(
    *,
    site: str | Site | None = None,
    since: Moment = "7d",
    until: Moment | None = None,
    users: Sequence[str] | None = None,
    account: str | None = None,
    states: Sequence[str] | None = None,
    name: str | None = None,
    jobs: Sequence[str | int] | None = None,
    cluster: str | None = None,
) -> pd.DataFrame:
    """Jobs of a site from the accounting, one row each, as a pandas DataFrame.

    The frame has the columns of `hpcjobs report jobs --csv`. ``frame.attrs["columns"]`` has the unit and the meaning of
    each, ``frame.attrs["doubts"]`` the doubtful rows (kind, rows, examples), ``frame.attrs["notes"]`` the reasons why a
    source was not used.

    Args:
        site: name or file of a site; default the site of this host.
        since: a span (``7d``) back from now, a date (``2026-11-01``, a datetime or a Timestamp; local without a time
            zone), or seconds since 1970; jobs that ended since then, and jobs that have not ended.
        until: the same; jobs submitted before.
        users: their names; default everybody's that sacct shows.
        states: names of Slurm, such as COMPLETED.
        name: shell pattern over job names.
        jobs: these ids, whenever they ran.
        cluster: name of another cluster of the site's slurmdbd, several with commas, or ``all``.

    Raises:
        HpcJobsError: pandas or polars is not installed. ConfigError: no such site. SchedulerError: neither sacct nor
            the queue answers. RequestError: a time, a state or a cluster does not exist.
    """
    require_packages("pandas", "polars", purpose="hpcjobs.accounting()")
    from hpcjobs.jobstats.sources import gather

    def tuple_of(values: Sequence[str | int] | None) -> tuple[str, ...] | None:
        return None if values is None else (values,) if isinstance(values, str) else tuple(map(str, values))

    check_states("states", tuple_of(states) or ())
    table = gather(
        JobFilter(
            since=parse_moment("since", since),
            until=None if until is None else parse_moment("until", until),
            users=tuple_of(users),
            account=account,
            states=tuple_of(states),
            name=name,
            job_ids=tuple_of(jobs),
            cluster=cluster,
        ),
        site=site,
    )
    frame = to_pandas(table.jobs)
    frame.attrs["columns"] = {name: f"{unit_of(name)}: {meaning}" for name, (_, meaning) in COLUMNS.items()}
    frame.attrs["doubts"] = [doubt._asdict() for doubt in table.doubts]
    frame.attrs["notes"] = table.notes
    return frame


def to_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    """Nullable integers, UTC times, categories for texts that repeat; without going through pyarrow."""
    import pandas as pd

    pandas_frame: pd.DataFrame = pd.DataFrame({name: _series(frame[name]) for name in frame.columns})
    return pandas_frame


def _series(column: pl.Series) -> pd.Series[Any]:
    import pandas as pd
    import polars as pl

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
