"""A million rows: none lost, none counted twice, never held at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sacct_versions import BEGUN, SEPARATOR, FakeSacct, printed, row, step

from hpcjobs.jobstats.columns import SACCT_COLUMNS, Doubts
from hpcjobs.jobstats.fold import fold
from hpcjobs.jobstats.sources import AccountingQuery, Sacct, frames
from hpcjobs.scheduler.slurm.parse import Table

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
    doubts, result, largest = Doubts(), [], 0
    for part in fold(frames(blocks(), Table(SACCT_COLUMNS, SEPARATOR), doubts), doubts):
        largest = max(largest, len(part))
        result.append((len(part), part["elapsed_s"].sum(), part["steps"].sum(), part["cpu_s"].sum()))
    assert [sum(column) for column in zip(*result, strict=True)] == [JOBS, JOBS * 3600, JOBS, JOBS * 14400.0]
    assert doubts.by_frequency() == []
    assert largest <= 20_001


def test_an_array_of_many_pending_tasks_is_told_in_full() -> None:
    """Left to itself sacct cuts ``4_[1,4,9,...]`` after 64 characters."""
    tasks = ",".join(str(n * n) for n in range(1, 40))
    pending = row(JobID=f"4_[{tasks}]", State="PENDING", Start="Unknown", End="Unknown", ElapsedRaw=0)
    fake = FakeSacct([pending])

    def like_slurm(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]:
        assert env is not None
        short = f"{tasks[:60]}...".encode()
        for block in fake.stream(argv, env=env):
            yield block if env.get("SLURM_BITSTR_LEN") == "0" else block.replace(tasks.encode(), short)

    sacct = Sacct(AccountingQuery("uni", BEGUN, BEGUN + 60, None), runner=fake.run, streamer=like_slurm)
    result = [job_id for frame in sacct.of_jobs(["4"], Doubts()) for job_id in frame["job_id"]]
    assert result == [f"4_[{tasks}]"]
