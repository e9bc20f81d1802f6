"""What a job printed, whole or one rank of it, now or as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcjobs.run.folder import log_path
from hpcjobs.run.index import Entry
from hpcjobs.run.status import own_ids
from hpcjobs.run.wait import Watch

_LABEL = re.compile(r" *0*(\d+): ?")
_POLL_S = 0.2


def paths(entry: Entry) -> list[Path]:
    """The job's log files: one, or one per array task; they may not be there yet."""
    return [log_path(Path(entry.run_dir), entry.name, job_id) for job_id in own_ids(entry)]


def lines(entry: Entry, *, rank: int | None = None) -> Iterator[str]:
    """Every line so far, array tasks one after the other; with ``rank``, that rank's without the label."""
    for path in paths(entry):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from _chosen(file, rank)


def follow(entry: Entry, *, rank: int | None = None, pause: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Lines as they come, until the job has ended (the first task of an array)."""
    path, rest, watch = paths(entry)[0], "", Watch([entry])
    while not path.exists():
        if not watch.look() and not path.exists():
            return
        pause(_POLL_S)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not watch.look()
            rest += file.read()
            *whole, rest = rest.split("\n")
            yield from _chosen((line + "\n" for line in whole), rank)
            if over:
                yield from _chosen([rest] if rest else [], rank)
                return
            if not whole:
                pause(_POLL_S)


def _chosen(source: Iterable[str], rank: int | None) -> Iterator[str]:
    for line in source:
        if rank is None:
            yield line
            continue
        label = _LABEL.match(line)
        if label and int(label[1]) == rank:
            yield line[label.end() :]
