"""Asks sacct for jobs, day by day."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import polars as pl

from hpcjobs.accounting.columns import choose, order
from hpcjobs.accounting.day_cache import DayCache, Window, windows
from hpcjobs.accounting.doubts import Doubts
from hpcjobs.accounting.fold import fold
from hpcjobs.accounting.parse import frames
from hpcjobs.accounting.stream import Streamer, stream
from hpcjobs.errors import SchedulerError
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.slurm.portions import split_ids
from hpcjobs.scheduler.slurm.table import QUESTION, Table, new_separator


class AccountingQuery(NamedTuple):
    """Whose jobs, and from when to when (seconds since 1970). ``users`` None: everybody's."""

    site: str
    since: float
    until: float
    users: tuple[str, ...] | None
    slurm_conf: str | None = None
    cluster: str | None = None


class Sacct:
    """The accounting of one cluster."""

    def __init__(self, query: AccountingQuery, *, runner: Runner = run, streamer: Streamer = stream) -> None:
        self._query = query
        self._runner, self._stream = runner, streamer
        self._env = dict(QUESTION)
        if query.slurm_conf:
            self._env["SLURM_CONF"] = query.slurm_conf
        self.windows_queried = 0
        """Windows that were read from sacct; the others were in the cache."""

    def attempts(self, doubts: Doubts) -> Iterator[pl.DataFrame]:
        """Ended attempts by the day of their end; of the last day also those that ended later, or have not ended.

        The last day is always read from sacct: its jobs may have ended since.

        Raises:
            SchedulerError: sacct refused, or lacks a column. CommandMissingError: there is no sacct.
        """
        columns = self._columns()
        cache = DayCache(*self._identity(), *columns)
        days = list(windows(self._query.since, self._query.until))
        for number, window in enumerate(days):
            last = number == len(days) - 1
            frame = None if last else cache.read(window)
            if frame is not None:
                yield frame
                continue
            answer = self._ask(window, columns, doubts)
            frame = answer.filter(_within(window))
            cache.write(window, frame)
            yield frame
            if last:
                end = int(window.end.timestamp())
                yield answer.filter(pl.col("ended").is_null() | (pl.col("ended") >= end))

    def of_jobs(self, job_ids: Sequence[str], doubts: Doubts) -> Iterator[pl.DataFrame]:
        """Every attempt of these jobs, whenever they ran and whoever's they are."""
        columns = self._columns()
        for portion in list(split_ids(job_ids)) or [[]]:
            yield self._rows([f"--jobs={','.join(portion)}", "--starttime=1970-01-02", "--allusers"], columns, doubts)

    def _columns(self) -> tuple[str, ...]:
        answer = self._runner(["sacct", "--helpformat"], env=self._env)
        if answer.code != 0:
            raise SchedulerError(f"sacct refused (exit code {answer.code}): {(answer.err or answer.out).strip()}")
        return order(choose(answer.out))

    def _identity(self) -> tuple[str, ...]:
        """What cached days depend on: two clusters, or two sets of users, never share them."""
        query = self._query
        conf = query.slurm_conf or os.environ.get("SLURM_CONF", "")
        return query.site, conf, query.cluster or "", "*" if query.users is None else ",".join(query.users)

    def _ask(self, window: Window, columns: Sequence[str], doubts: Doubts) -> pl.DataFrame:
        self.windows_queried += 1
        users = self._query.users
        who = ["--allusers"] if users is None else [f"--user={','.join(users)}"]
        return self._rows([*window.arguments, *who], columns, doubts)

    def _rows(self, arguments: Iterable[str], columns: Sequence[str], doubts: Doubts) -> pl.DataFrame:
        table = Table(tuple(columns), new_separator())
        cluster = [f"--clusters={self._query.cluster}"] if self._query.cluster else []
        blocks = self._stream(table.sacct("--duplicates", *cluster, *arguments), env=self._env)
        attempts = list(fold(frames(blocks, table, doubts), doubts))
        return pl.concat(attempts) if attempts else fold_nothing(columns)


def fold_nothing(columns: Sequence[str]) -> pl.DataFrame:
    """No rows, with the columns that rows would have."""
    one = pl.DataFrame({name: ["0"] for name in columns}, schema=dict.fromkeys(columns, pl.String))
    return next(fold([one], Doubts())).clear()


def _within(window: Window) -> pl.Expr:
    return (pl.col("ended") >= int(window.begin.timestamp())) & (pl.col("ended") < int(window.end.timestamp()))
