"""Splits a time range into days to ask sacct for, and caches the days that are over.

A job belongs to the day it ended on, so each is in exactly one day and nothing is merged. A day is closed
two hours after its end (slurmdbd may lag); its jobs are cached as Parquet and not read from sacct again. Records
that an administrator changes later (sacctmgr fix runawayjobs) need the folder removed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import polars as pl

from hpcjobs.errors import ConfigError
from hpcjobs.files import cache_dir

_LAG_S = 2 * 3600
_VERSION = 2
"""Raise it when the meaning of cached columns changes."""


class Window(NamedTuple):
    """From ``begin`` up to ``end``, local time; ``closed``: nothing can be added to it any more."""

    begin: datetime
    end: datetime
    closed: bool

    @property
    def arguments(self) -> tuple[str, str]:
        """Options of sacct."""
        return f"--starttime={self.begin:%Y-%m-%dT%H:%M:%S}", f"--endtime={self.end:%Y-%m-%dT%H:%M:%S}"


def windows(since: float, until: float, *, now: float | None = None) -> Iterator[Window]:
    """The local days that cover ``since`` to ``until`` (seconds since 1970), the last one up to now."""
    current = time.time() if now is None else now
    day = datetime.fromtimestamp(since).date()
    while _midnight(day).timestamp() < min(until, current):
        begin, end = _midnight(day), _midnight(day + timedelta(days=1))
        yield Window(begin, end, closed=end.timestamp() + _LAG_S < current)
        day += timedelta(days=1)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day)


class DayCache:
    """Closed days of one question (cluster, whose jobs, columns) in the user's cache folder."""

    def __init__(self, *question: str) -> None:
        digest = hashlib.sha256("\0".join((str(_VERSION), *question)).encode()).hexdigest()[:16]
        self.folder = _cache_folder() / digest

    def read(self, window: Window) -> pl.DataFrame | None:
        """The day's attempts; None: they are not in the cache."""
        path = self._path(window)
        if not window.closed or not path.exists():
            return None
        try:
            return pl.read_parquet(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", hint="remove it: the day is read from sacct again"
            ) from error

    def write(self, window: Window, frame: pl.DataFrame) -> None:
        """Store a closed day; written beside and renamed."""
        if not window.closed:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = self.folder / f".{window.begin:%Y-%m-%d}.{os.getpid()}"
        frame.write_parquet(beside, compression="zstd")
        beside.replace(self._path(window))

    def _path(self, window: Window) -> Path:
        return self.folder / f"{window.begin:%Y-%m-%d}.parquet"


def _cache_folder() -> Path:
    return cache_dir() / "sacct"
