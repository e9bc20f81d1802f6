"""Windows of time of the accounting that are closed, and the attempts of each in the user's cache folder.

An attempt belongs to the window of its end. Time is closed two hours later, because slurmdbd may lag: closed windows
are not read from sacct again. A window is a local day, or the part of one that was closed when it was read. Records
that an administrator changes later (sacctmgr fix runawayjobs) need the folder removed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import polars as pl

from hpcjobs.errors import ConfigError
from hpcjobs.files import cache_dir, make_folder

_LAG_S: Final = 2 * 3600
_HOUR_S: Final = 3600
_VERSION: Final = 6
"""Raise it when the meaning of cached columns changes."""
Part = TypeVar("Part", covariant=True)


class Window(NamedTuple):
    """From ``begin`` up to ``end``, seconds since 1970."""

    begin: int
    end: int


def days(since: float, until: float, *, now: float | None = None) -> Iterator[Window]:
    """The local days that cover ``since`` to ``until`` (seconds since 1970), the last one up to now."""
    current = time.time() if now is None else now
    day = datetime.fromtimestamp(since).date()
    while _midnight(day) < min(until, current):
        following = day + timedelta(days=1)
        yield Window(_midnight(day), _midnight(following))
        day = following


def closed_until(now: float) -> int:
    """The end of the time to which slurmdbd adds no more jobs, a full hour."""
    return int((now - _LAG_S) // _HOUR_S * _HOUR_S)


def _midnight(day: date) -> int:
    return int(datetime(day.year, day.month, day.day).timestamp())


class Store(Protocol[Part]):
    """Keeps a report's data about the attempts of closed windows."""

    def windows(self, day: Window) -> list[Window]:
        """The windows of the day that are kept, one after the other, from its begin on."""
        ...

    def read(self, window: Window) -> Part: ...

    def keep(self, window: Window | None, frame: pl.DataFrame) -> Part:
        """The part of the report that ``frame`` gives; kept, if its window is closed."""
        ...


def query_folder(kind: str, *question: str) -> Path:
    """The folder of a query (site, cluster, users, columns, ...): two queries never share one."""
    digest = hashlib.sha256("\0".join((str(_VERSION), *question)).encode()).hexdigest()[:16]
    return cache_dir() / kind / digest


def following(day: Window, ends: dict[int, int]) -> list[Window]:
    """Windows from the begin of the day on, each from the end of the one before; ``ends``: begin -> end."""
    windows: list[Window] = []
    at = day.begin
    while at in ends and at < ends[at] <= day.end:
        windows.append(Window(at, ends[at]))
        at = ends[at]
    return windows


class AttemptStore:
    """All columns of the attempts: a Parquet file per window."""

    def __init__(self, *question: str) -> None:
        self._folder = query_folder("sacct", *question)
        self._ends: dict[int, int] = {}
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        for begin, _, end in (name.removesuffix(".parquet").partition("-") for name in names if name[0] != "."):
            self._ends[int(begin)] = max(int(end), self._ends.get(int(begin), 0))

    def windows(self, day: Window) -> list[Window]:
        return following(day, self._ends)

    def read(self, window: Window) -> pl.DataFrame:
        """Raises ConfigError if the file is damaged."""
        return read_parquet(self._path(window))

    def keep(self, window: Window | None, frame: pl.DataFrame) -> pl.DataFrame:
        if window is not None:
            write_parquet(self._path(window), frame)
        return frame

    def _path(self, window: Window) -> Path:
        return self._folder / f"{window.begin}-{window.end}.parquet"


def read_parquet(path: Path) -> pl.DataFrame:
    """Raises ConfigError if the file cannot be read."""
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="remove it: its days are read from sacct again"
        ) from error


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Write a temporary file of the user alone, then rename it."""
    make_folder(path.parent)
    beside = path.with_name(f".{path.stem}.{os.getpid()}")
    frame.write_parquet(beside, compression="zstd")
    beside.replace(path)
