"""Asks sacct day by day, and reads its rows: jobs and their steps, as text.

A block with one record per line goes to polars unchanged, which is much faster. Other blocks are split by
`Table.split`. Lines without a record are counted, named and left out.

A job belongs to the day of its end. A day is closed two hours after its end, because slurmdbd may lag. Jobs of
closed days are cached as Parquet and not read from sacct again. Records that an administrator changes later
(sacctmgr fix runawayjobs) need the folder removed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Final, NamedTuple, Protocol

import polars as pl

from hpcjobs.accounting.columns import Doubts, choose, order
from hpcjobs.accounting.fold import fold
from hpcjobs.errors import ConfigError, SchedulerError
from hpcjobs.files import cache_dir
from hpcjobs.processes.programs import Runner, run, start
from hpcjobs.scheduler.slurm.portions import split_ids
from hpcjobs.scheduler.slurm.table import CONTROL, QUESTION, SEPARATOR, Table, new_separator

_SEPARATOR: Final = SEPARATOR.encode()
_CONTROL: Final = CONTROL.encode().replace(_SEPARATOR, b"")


def frames(blocks: Iterable[bytes], table: Table, doubts: Doubts) -> Iterator[pl.DataFrame]:
    """One frame of strings per block; null where sacct left a column empty."""
    rest = b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        lines, rest = data[:end], data[end:]
        frame = _frame_of_lines(lines, table)
        if frame is None and lines:
            split = table.split(lines.decode("utf-8", "replace"))
            if len(table.separator) == 1:
                doubts.add("put together from several lines", (_start(record, table) for record in split.merged))
            doubts.add("not the columns asked for", (_start(text, table) for text in split.refused))
            rest = split.rest.encode() + rest
            text = "".join(f"{record}\n" for record in split.records)
            frame = _frame(text.encode(), table) if text else None
        if frame is not None and len(frame):
            yield frame
    if rest.strip():
        doubts.add("truncated", [_start(rest.decode("utf-8", "replace"), table)])


def _frame_of_lines(lines: bytes, table: Table) -> pl.DataFrame | None:
    """The frame, if every line is one record: the sum of separators is right, and no line has too many."""
    separators = lines.count(table.separator.encode())
    if not lines or separators != lines.count(b"\n") * (len(table.columns) - 1):
        return None
    try:
        return _frame(lines, table)
    except pl.exceptions.ComputeError:
        return None


def _start(record: str, table: Table) -> str:
    """The start of a record, for people."""
    return record[:160].replace(table.separator, "|").strip().replace("\n", " ")


def _frame(lines: bytes, table: Table) -> pl.DataFrame:
    separator = table.separator.encode()
    if len(separator) > 1:  # polars splits at one character
        if lines.count(_SEPARATOR) != lines.count(separator):  # somebody's name holds the first character of it
            lines = lines.replace(separator, b"\0").replace(_SEPARATOR, b" ").replace(b"\0", _SEPARATOR)
        lines = lines.translate(None, delete=_CONTROL)
        separator = _SEPARATOR
    return pl.read_csv(
        lines,
        separator=separator.decode(),
        has_header=False,
        infer_schema=False,
        quote_char=None,
        new_columns=list(table.columns),
    )


class Streamer(Protocol):
    """Runs a program and gives its output in blocks. Tests put a recorded answer here."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]: ...


def stream(argv: Sequence[str], *, env: Mapping[str, str] | None = None, block_bytes: int = 4 << 20) -> Iterator[bytes]:
    """Standard output of ``argv`` in blocks as it comes: for answers too large to hold.

    Raises:
        CommandMissingError: the program is not on PATH.
        SchedulerError: it ended with a code other than 0 (after its output has been given).
    """
    with tempfile.TemporaryFile() as errors:
        with start(argv, env=env, stdout=PIPE, stderr=errors) as process:
            assert process.stdout is not None
            try:
                while block := process.stdout.read(block_bytes):
                    yield block
            except GeneratorExit:
                process.kill()
                raise
        if process.returncode != 0:
            errors.seek(0)
            message = errors.read().decode("utf-8", "replace").strip() or "(nothing)"
            raise SchedulerError(f"{argv[0]} refused (exit code {process.returncode}): {message}")


_LAG_S = 2 * 3600
_VERSION = 2
"""Raise it when the meaning of cached columns changes."""


class Window(NamedTuple):
    """From ``begin`` up to ``end``, local time; ``closed``: slurmdbd adds no more jobs to it."""

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
    """Closed days of one query (cluster, users, columns) in the user's cache folder."""

    def __init__(self, *question: str) -> None:
        digest = hashlib.sha256("\0".join((str(_VERSION), *question)).encode()).hexdigest()[:16]
        self.folder = cache_dir() / "sacct" / digest

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
        """Store a closed day: write a temporary file, then rename it."""
        if not window.closed:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = self.folder / f".{window.begin:%Y-%m-%d}.{os.getpid()}"
        frame.write_parquet(beside, compression="zstd")
        beside.replace(self._path(window))

    def _path(self, window: Window) -> Path:
        return self.folder / f"{window.begin:%Y-%m-%d}.parquet"


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
        """Ended attempts by the day of their end; of the last day also jobs that ended later, or have not ended.

        The last day is always read from sacct: its jobs may have ended since.

        Raises:
            SchedulerError: sacct refused, or lacks a column. CommandMissingError: sacct is not installed.
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
            begin, end = int(window.begin.timestamp()), int(window.end.timestamp())
            frame = answer.filter((pl.col("ended") >= begin) & (pl.col("ended") < end))
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
        """Key of cached days: two clusters, or two sets of users, never share them."""
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
