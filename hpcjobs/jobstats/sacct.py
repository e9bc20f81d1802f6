"""Asks sacct day by day, and reads its rows: jobs and their steps, as text.

A block with one record per line goes to polars unchanged, which is much faster. Other blocks are split by
`Table.split`. Lines without a record are counted, named and left out.

A job belongs to the day of its end. Parts of a day that `cache` keeps are not read again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from subprocess import PIPE
from typing import Final, NamedTuple, Protocol, TypeVar

import polars as pl

from hpcjobs.errors import SchedulerError
from hpcjobs.jobstats.cache import AttemptStore, Store, Window, closed_until, days
from hpcjobs.jobstats.columns import CLUSTER, Doubts, choose, order
from hpcjobs.jobstats.fold import COUNTS, fold, unused_fields
from hpcjobs.processes.programs import Runner, run, start
from hpcjobs.scheduler.slurm.client import split_ids
from hpcjobs.scheduler.slurm.parse import CONTROL, SEPARATOR, Table, new_separator
from hpcjobs.slurm_commands import list_accounted, list_accounted_fields, question_env

Part = TypeVar("Part")
_SEPARATOR: Final = SEPARATOR.encode()
_CONTROL: Final = CONTROL.encode().replace(_SEPARATOR, b"")
_NUMBERS: Final = dict.fromkeys(COUNTS, pl.Int64)


def frames(
    blocks: Iterable[bytes], table: Table, doubts: Doubts, *, without: Collection[str] = ()
) -> Iterator[pl.DataFrame]:
    """One frame per block, in the order of the blocks; null where sacct left a column empty.

    ``without``: columns that the frames need not have.

    A second thread reads the next block while the caller works on this one.
    """
    source = _read_frames(blocks, table, doubts, without)
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(next, source, None)
        try:
            while (frame := ahead.result()) is not None:
                ahead = reader.submit(next, source, None)
                yield frame
        finally:
            ahead.cancel() or wait([ahead])
            source.close()


def _read_frames(
    blocks: Iterable[bytes], table: Table, doubts: Doubts, without: Collection[str]
) -> Generator[pl.DataFrame, None, None]:
    rest = b""
    for block in blocks:
        end = block.rfind(b"\n") + 1
        lines, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
        frame = _frame_of_lines(lines, table, without)
        if frame is None and lines:
            split = table.split(lines.decode("utf-8", "replace"))
            if len(table.separator) == 1:
                doubts.add("put together from several lines", (_start(record, table) for record in split.merged))
            doubts.add("not the columns asked for", (_start(text, table) for text in split.refused))
            rest = split.rest.encode() + rest
            text = "".join(f"{record}\n" for record in split.records)
            frame = _frame(text.encode(), table, without) if text else None
        if frame is not None and len(frame):
            yield frame
    if rest.strip():
        doubts.add("truncated", [_start(rest.decode("utf-8", "replace"), table)])


def _frame_of_lines(lines: bytes, table: Table, without: Collection[str]) -> pl.DataFrame | None:
    """The frame, if every line is one record.

    polars refuses a line with too many separators. So if the total number of separators fits the number of records,
    each line has the right number, and no name contains a separator.
    """
    if not lines:
        return None
    one_character = lines if len(table.separator) == 1 else lines.translate(None, delete=_CONTROL)
    for types in (_NUMBERS, {}):  # a column of numbers that contains a word is read as text
        try:
            frame = _read_csv(one_character, table, types, without)
        except (pl.exceptions.ComputeError, pl.exceptions.SchemaError):
            continue
        sound = lines.count(table.separator.encode()) == len(frame) * (len(table.columns) - 1)
        return frame if sound else None
    return None


def _start(record: str, table: Table) -> str:
    """The start of a record, for people."""
    return record[:160].replace(table.separator, "|").strip().replace("\n", " ")


def _frame(lines: bytes, table: Table, without: Collection[str]) -> pl.DataFrame:
    """The frame of records with characters of the separator in names; all columns as text."""
    separator = table.separator.encode()
    if len(separator) > 1:  # polars splits at one character
        lines = lines.replace(separator, b"\0").replace(_SEPARATOR, b" ").replace(b"\0", _SEPARATOR)
        lines = lines.translate(None, delete=_CONTROL)
    return _read_csv(lines, table, {}, without)


def _read_csv(
    lines: bytes, table: Table, types: Mapping[str, type[pl.DataType]], without: Collection[str]
) -> pl.DataFrame:
    rows = pl.scan_csv(
        lines,
        separator=table.separator[0],
        has_header=False,
        quote_char=None,
        schema={name: types.get(name, pl.String) for name in table.columns},
    )
    return rows.select(name for name in table.columns if name not in without).collect()


class Streamer(Protocol):
    """Runs a program and gives its output in blocks. Tests put a recorded answer here."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]: ...


def stream(argv: Sequence[str], *, env: Mapping[str, str] | None = None, block_bytes: int = 5 << 20) -> Iterator[bytes]:
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

    def __init__(
        self,
        query: AccountingQuery,
        *,
        runner: Runner = run,
        streamer: Streamer = stream,
        with_cluster: bool = False,
    ) -> None:
        self._query, self._with_cluster = query, with_cluster
        self._runner, self._stream = runner, streamer
        self._env = question_env(query.slurm_conf)
        self.windows_queried = 0
        """Windows that were read from sacct; the others were in the cache."""

    def attempts(self, doubts: Doubts) -> Iterator[pl.DataFrame]:
        """All columns of the attempts that `parts` selects."""
        yield from self.parts(AttemptStore(*self.identity(), *self._columns()), doubts)

    def parts(self, store: Store[Part], doubts: Doubts, *, only: Collection[str] | None = None) -> Iterator[Part]:
        """Ended attempts by the day of their end; of the last day also jobs that ended later, or have not ended.

        The end of the last day is always read from sacct: its jobs may have ended since.

        Args:
            only: columns that the store needs.

        Raises:
            SchedulerError: sacct refused, or lacks a column. CommandMissingError: sacct is not installed.
        """
        columns, now = self._columns(), time.time()
        every = list(days(self._query.since, self._query.until, now=now))
        for number, day in enumerate(every):
            last = number == len(every) - 1
            closed_windows = store.windows(day)
            if last and closed_windows and closed_windows[-1].end == day.end:
                closed_windows = []
            yield from map(store.read, closed_windows)
            begin = closed_windows[-1].end if closed_windows else day.begin
            if begin == day.end:
                continue
            answer = self._ask(Window(begin, day.end), columns, doubts, only)
            closed = min(day.end, max(begin, closed_until(now)))
            if closed > begin:
                yield store.keep(Window(begin, closed), answer.filter(pl.col("ended").is_between(begin, closed - 1)))
            if closed < day.end:
                yield store.keep(None, answer.filter(pl.col("ended").is_between(closed, day.end - 1)))
            if last:
                yield store.keep(None, answer.filter(pl.col("ended").is_null() | (pl.col("ended") >= day.end)))

    def of_jobs(self, job_ids: Sequence[str], doubts: Doubts) -> Iterator[pl.DataFrame]:
        """Every attempt of these jobs, whenever they ran and whoever's they are."""
        columns = self._columns()
        for portion in list(split_ids(job_ids)) or [[]]:
            yield self._rows(columns, doubts, users=None, since=0, jobs=portion)

    def _columns(self) -> tuple[str, ...]:
        answer = self._runner(list_accounted_fields(), env=self._env)
        if answer.code != 0:
            raise SchedulerError(f"sacct refused (exit code {answer.code}): {(answer.err or answer.out).strip()}")
        return order(choose(answer.out, (CLUSTER,) if self._with_cluster else ()))

    def identity(self) -> tuple[str, ...]:
        """Key of cached days: two clusters, or two sets of users, never share them."""
        query = self._query
        conf = query.slurm_conf or os.environ.get("SLURM_CONF", "")
        return query.site, conf, query.cluster or "", "*" if query.users is None else ",".join(query.users)

    def _ask(
        self, window: Window, columns: Sequence[str], doubts: Doubts, only: Collection[str] | None
    ) -> pl.DataFrame:
        self.windows_queried += 1
        return self._rows(columns, doubts, users=self._query.users, since=window.begin, until=window.end, only=only)

    def _rows(
        self,
        columns: Sequence[str],
        doubts: Doubts,
        *,
        users: Sequence[str] | None,
        since: float,
        until: float | None = None,
        jobs: Sequence[str] = (),
        only: Collection[str] | None = None,
    ) -> pl.DataFrame:
        table = Table(tuple(columns), new_separator())
        argv = list_accounted(
            *table,
            jobs=jobs,
            users=users,
            since=since,
            until=until,
            clusters=self._query.cluster,
            steps=True,
            attempts=True,
        )
        rows = frames(self._stream(argv, env=self._env), table, doubts, without=unused_fields(only))
        attempts = list(fold(rows, doubts, only=only))
        return pl.concat(attempts) if attempts else fold_nothing(columns, only)


def fold_nothing(columns: Sequence[str], only: Collection[str] | None = None) -> pl.DataFrame:
    """No rows, with the columns that rows would have."""
    one = pl.DataFrame({name: ["0"] for name in columns}, schema=dict.fromkeys(columns, pl.String))
    return next(fold([one], Doubts(), only=only)).clear()
