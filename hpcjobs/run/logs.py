"""Reads the output of a job: all lines or a selection, once or as they come."""

from __future__ import annotations

import os
import re
import time
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import HpcJobsWarning, RequestError
from hpcjobs.files import file_name
from hpcjobs.record import manifest
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import Tail, find_start, log_path, own_ids, read_job_manifest, read_state
from hpcjobs.run.listing import log_file, log_files
from hpcjobs.run.progress import job_staging
from hpcjobs.run.status import Connect
from hpcjobs.run.wait import OUTAGE_S, PER_FILE_S, Watch
from hpcjobs.scheduler.base import Report, connect, discard
from hpcjobs.slurm_commands import read_hosts
from hpcjobs.units import array_text

RANK_LABEL = re.compile(r" *0*(\d{1,6}):(?!\d\d\b) ?")
"""Not the hour of a line that begins with a time of day."""
_MOST_HELD = 5_000
"""So many different lines are held back at most, to wait for equal ones of other ranks: a program that writes to a pipe
prints hundreds of lines at once."""


def merge_ranks(lines: Iterable[str]) -> Iterator[str]:
    """``lines`` with equal ones of several ranks as one; the order within each rank stays.

    Lines of one rank keep their order, also if other ranks are further ahead.

    Lines without a rank are not merged, and come after all lines before them.
    """
    held = _HeldLines()
    for line in lines:
        label = RANK_LABEL.match(line)
        if label is None:
            yield from held.release(0)
            yield line
            continue
        held.add(int(label[1]), line[label.end() :])
        yield from held.release(_MOST_HELD)
    yield from held.release(0)


class _Place(NamedTuple):
    """Position of a held line; lines are printed in this order."""

    number: int
    """Number of the corresponding line of the leading rank."""
    behind: int
    """0: the leading rank's line. Otherwise the number of lines behind it."""
    rank: int


class _HeldLines:
    """Different lines, each with the ranks that have printed it."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[_Place, tuple[str, set[int]]]] = {}
        """By the number of the place."""
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)
        """By the text, which may have come several times; in their order."""
        self._newest: dict[int, _Place] = {}
        """Rank -> place of its newest line; the next one follows."""
        self._oldest_number = self._next_number = self._count = 0

    def add(self, rank: int, text: str) -> None:
        """Add the rank to the first line of this text that can be its next one, or add the line."""
        newest = self._newest.get(rank, _Place(-1, 0, rank))
        places = self._places[text]
        at = bisect_right(places, newest)
        if at < len(places):
            place = places[at]
            self._groups[place.number][place][1].add(rank)
        else:
            place = self._next_place(newest, rank)
            places.append(place)
            self._groups.setdefault(place.number, {})[place] = (text, {rank})
            self._count += 1
        self._newest[rank] = place

    def _next_place(self, newest: _Place, rank: int) -> _Place:
        if newest.number == self._next_number - 1:  # no rank is further ahead
            self._next_number += 1
            return _Place(self._next_number - 1, 0, rank)
        if newest.number < self._oldest_number:
            return _Place(self._oldest_number, 1, rank)
        return _Place(newest.number, newest.behind + 1, rank)

    def release(self, most: int) -> Iterator[str]:
        """Give out the oldest lines, until at most ``most`` are left."""
        while self._count > most:
            group = self._groups.pop(self._oldest_number, {})
            self._oldest_number += 1
            self._count -= len(group)
            for place in sorted(group):
                text, ranks = group[place]
                places = self._places[text]
                places.remove(place)  # at or near their begin
                if not places:
                    del self._places[text]
                yield f"{array_text(sorted(ranks))}: {text}"


_POLL_S = 0.2
_STAGING_S = 5.0
"""Between two reports of copies."""


class Selection(NamedTuple):
    """Which lines of a log to print; None: all."""

    rank: int | None = None
    """Of this rank, without the label."""
    node: str | None = None
    """Only ranks on this node."""
    pattern: re.Pattern[str] | None = None
    """Those that it matches somewhere, behind the label."""
    last: int | None = None
    """So many at the end, of each task of an array."""
    since: float | None = None
    """Those behind the last line with an older time, in seconds since 1970."""
    merges: bool = False
    """A line that several ranks printed comes once, behind all their numbers: ``0-7: ``."""


ALL = Selection()


class _Log(NamedTuple):
    """The log of one job or array task, and which of its lines to print."""

    job_id: str
    path: Path
    selection: Selection
    ranks: range | None

    def choose_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Select lines to print."""
        printed = self._choose_each(lines)
        return merge_ranks(printed) if self.selection.merges and self.selection.rank is None else printed

    def _choose_each(self, lines: Iterable[str]) -> Iterator[str]:
        is_chosen, ends = True, True
        for line in lines:
            chosen = self.choose(line) if ends else line if is_chosen else None  # a piece goes with the one before it
            is_chosen, ends = chosen is not None, line.endswith("\n")
            if chosen is not None:
                yield chosen

    def choose(self, line: str) -> str | None:
        """The text to print; None if the line is not selected."""
        label = None if self.ranks is None and self.selection.pattern is None else RANK_LABEL.match(line)
        if self.ranks is not None and (label is None or int(label[1]) not in self.ranks):
            return None
        text = line[label.end() :] if label else line
        if self.selection.pattern is not None and not self.selection.pattern.search(text.rstrip("\n")):
            return None
        return text if self.selection.rank is not None else line

    def tail(self) -> Tail:
        """The log from the first line to print."""
        count, since = self.selection.last, self.selection.since
        if count is None and since is None:
            return Tail(self.path)
        try:
            start = find_start(
                self.path, count=count, since=since, accepts=lambda line: self.choose(line + "\n") is not None
            )
        except (FileNotFoundError, NotADirectoryError):
            start = 0
        except ValueError as error:
            raise RequestError(f"--since: {error}", hint="-n N prints the last N lines") from error
        return Tail(self.path, start=start)


def paths(entry: Entry) -> list[Path]:
    """The job's log files: one, or one per array task; they may not be there yet."""
    if entry.is_foreign:
        return log_files(entry)
    return [log_path(Path(entry.run_dir), entry.name, job_id) for job_id in own_ids(entry)]


def path_of(entry: Entry, job_id: str) -> Path | None:
    """The log file of the record ``job_id``: of the job, a component, or one array task; None: it is not there."""
    if entry.array is not None and not job_id.partition("_")[2].isdecimal():
        return None  # tasks that never began
    own_id = entry.job_id if entry.array is None else job_id
    path = log_file(job_id, entry.slurm_conf) if entry.is_foreign else log_path(Path(entry.run_dir), entry.name, own_id)
    return path if os.path.exists(path) else None


def existing_paths(entry: Entry) -> list[Path]:
    """The job's log files that are there already."""
    if entry.is_foreign:
        return [path for path in log_files(entry) if path.exists()]
    folder = log_path(Path(entry.run_dir), entry.name, entry.job_id).parent
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    prefix = file_name(entry.name)
    return [folder / name for job_id in own_ids(entry) if (name := f"{prefix}_{job_id}.out") in names]


def lines(entry: Entry, *, rank: int | None = None, selection: Selection = ALL) -> Iterator[str]:
    """All lines until now, array tasks one after the other; ``rank`` selects one rank, without the label.

    Raises RequestError: the selection names a node the job did not run on, or a time and the log has none.
    """
    for log in _logs(entry, selection._replace(rank=rank) if rank is not None else selection):
        yield from _written(log)


def _written(log: _Log) -> Iterator[str]:
    try:
        yield from log.choose_lines(log.tail().news(last=True))
    except OSError as error:
        warnings.warn(f"{log.path} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=2)


def follow(
    entry: Entry,
    *,
    rank: int | None = None,
    selection: Selection = ALL,
    timestamps: bool = False,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> Iterator[str]:
    """Lines as they come, until the job has ended for good; of an array each line behind its task's number.

    A job that was requeued is followed on. With ``timestamps`` a line begins with the time at which it was read; before
    lines that were there already are as many blanks.

    Raises RequestError: as of `lines`.
    """
    watch = Watch([entry], connect=connect, clock=clock, report=report)
    staging = _StagingReports(entry, clock=clock, report=report)
    logs = _logs(entry, selection._replace(rank=rank) if rank is not None else selection)
    labels = [f"[{log.job_id.partition('_')[2]}] " if len(logs) > 1 else "" for log in logs]
    tails = [log.tail() for log in logs]
    stamp = _timestamp if timestamps else str
    moment = " " * len(stamp())

    def news(moment: str, *, last: bool) -> Iterator[str]:
        for label, log, tail in zip(labels, logs, tails, strict=True):
            for line in log.choose_lines(tail.news(last=last)):
                yield moment + label + line

    while True:
        is_over, is_quiet = not watch.look(), True
        if not is_over:
            staging.report_changes()
        for line in news(moment, last=False):
            yield line
            is_quiet = False
        if is_over:
            known = watch.final(pause=pause)
            if known is not None and watch.is_over(known):
                yield from news(moment, last=True)
                return
            if known is None:
                pause(OUTAGE_S)
            else:
                watch.again(known)
        elif is_quiet:
            pause(max(_POLL_S, PER_FILE_S * len(tails)))
        moment = stamp()


class _StagingReports:
    """Reports the progress of `--stage-to` copies, during which the program prints nothing."""

    def __init__(self, entry: Entry, *, clock: Callable[[], float], report: Report) -> None:
        self._entry, self._clock, self._report = entry, clock, report
        self._ids = own_ids(entry)
        self._texts: dict[str, str] = {}
        self._next = clock()

    def report_changes(self) -> None:
        """Report changes every few seconds."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + max(_STAGING_S, PER_FILE_S * len(self._ids))
        for job_id in self._ids:
            staging = job_staging(self._entry.run_dir, job_id)
            if staging is not None and self._texts.get(job_id) != str(staging):
                self._texts[job_id] = str(staging)
                self._report(f"job {job_id} data: {staging}")


def has_labels(entry: Entry) -> bool:
    """Whether each line of the log begins with its rank."""
    try:
        job = manifest.read_manifest(Path(entry.run_dir)).request
    except (OSError, ValueError):  # a damaged run folder: its log is still of use
        return False
    return (job.max_nodes or job.nodes) * job.ntasks_per_node > 1 and job.batch_script is None


def _timestamp() -> str:
    """The local time with its zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds") + " "


def _logs(entry: Entry, selection: Selection) -> list[_Log]:
    ids = zip(own_ids(entry), paths(entry), strict=True)
    if selection.rank is not None:
        return [_Log(job_id, path, selection, range(selection.rank, selection.rank + 1)) for job_id, path in ids]
    if selection.node is None:
        return [_Log(job_id, path, selection, None) for job_id, path in ids]
    per_node, nodes, logs = _tasks_per_node(entry), list[str](), []
    for job_id, path in ids:
        state = read_state(entry, job_id)
        here = read_hosts(state.nodes) if state is not None else []
        nodes += here
        if selection.node in here:
            first = here.index(selection.node) * per_node
            logs.append(_Log(job_id, path, selection, range(first, first + per_node)))
    if not logs:
        where = f"ran on {', '.join(dict.fromkeys(nodes))}" if nodes else "has not started"
        raise RequestError(f"--node {selection.node}: job {entry.job_id} {where}")
    return logs


def _tasks_per_node(entry: Entry) -> int:
    job = read_job_manifest(Path(entry.run_dir)).job
    if job.batch_script is not None:
        raise RequestError("--node: which rank of a batch script ran on which node is unknown")
    if job.ntasks == 1:
        raise RequestError("--node: the job has one task, whose lines have no rank", hint="leave --node out")
    return job.ntasks_per_node
