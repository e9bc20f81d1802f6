"""A million rows: none lost, none counted twice, never held at once."""

from __future__ import annotations

from collections.abc import Iterator

from versions import SEPARATOR, printed, row, step

from hpcjobs.report.columns import SACCT_COLUMNS
from hpcjobs.report.fold import fold
from hpcjobs.report.rows import Doubts, frames

JOBS = 500_000


def blocks() -> Iterator[bytes]:
    """Blocks of 20,000 jobs and their steps; each but the last ends in the middle of a row, the rest comes next."""
    job = row()
    two = printed([job, step(job)], SACCT_COLUMNS, SEPARATOR)
    rest = b""
    for _ in range(JOBS // 20_000):
        data = rest + two * 20_000
        yield data[:-100]
        rest = data[-100:]
    yield rest


def test_a_million_rows_are_folded_block_by_block() -> None:
    doubts, found, largest = Doubts(), [], 0
    for part in fold(frames(blocks(), SACCT_COLUMNS, separator=SEPARATOR, doubts=doubts), doubts):
        largest = max(largest, len(part))
        found.append((len(part), part["elapsed_s"].sum(), part["steps"].sum(), part["cpu_s"].sum()))
    assert [sum(column) for column in zip(*found, strict=True)] == [JOBS, JOBS * 3600, JOBS, JOBS * 14400.0]
    assert doubts.told() == []
    assert largest <= 20_001
