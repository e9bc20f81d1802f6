"""What a job printed, all of it or one rank's, now or as it comes."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.run.folder import log_path
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import own_ids
from hpcjobs.run.status import Connect
from hpcjobs.run.wait import PER_FILE_S, Watch
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.outage import Report, discard

_LABEL = re.compile(r" *0*(\d+): ?")
_POLL_S = 0.2


def paths(entry: Entry) -> list[Path]:
    """The job's log files: one, or one per array task; they may not be there yet."""
    return [log_path(Path(entry.run_dir), entry.name, job_id) for job_id in own_ids(entry)]


def lines(entry: Entry, *, rank: int | None = None) -> Iterator[str]:
    """Every line so far, array tasks one after the other; with ``rank``, that rank's without the label."""
    for path in paths(entry):
        yield from _chosen(_content(path), rank)


def _content(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        warnings.warn(f"{path} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=2)


def follow(
    entry: Entry,
    *,
    rank: int | None = None,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> Iterator[str]:
    """Lines as they come, until the job has ended; of an array all tasks', each line behind its task's number."""
    watch = Watch([entry], connect=connect, clock=clock, report=report)
    ids, tails = own_ids(entry), [Tail(path) for path in paths(entry)]
    labels = [f"[{job_id.partition('_')[2]}] " if len(ids) > 1 else "" for job_id in ids]
    while True:
        over, news = not watch.look(), False
        for label, tail in zip(labels, tails, strict=True):
            for line in _chosen(tail.news(last=over), rank):
                yield label + line
                news = True
        if over:
            return
        if not news:
            pause(max(_POLL_S, PER_FILE_S * len(tails)))


class Tail:
    """A file that grows, or is not there yet. It is open only while it is read: an array has many."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def news(self, *, last: bool) -> list[str]:
        """The lines that have come; with ``last``, what stands behind them too."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size == self._read_bytes:
            return []
        if size < self._read_bytes:  # begun anew
            self._read_bytes = 0
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        length = len(new) if last else new.rfind(b"\n") + 1
        self._read_bytes += length
        return [
            line + "\n" for line in new[:length].decode("utf-8", "replace").removesuffix("\n").split("\n") if length
        ]


def _chosen(source: Iterable[str], rank: int | None) -> Iterator[str]:
    for line in source:
        if rank is None:
            yield line
            continue
        label = _LABEL.match(line)
        if label and int(label[1]) == rank:
            yield line[label.end() :]
