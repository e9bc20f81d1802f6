"""Sums by group whose closed days are kept: the same figures, one question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sacct_versions import FakeSacct, row, step

from hpcjobs.jobstats import totals
from hpcjobs.jobstats.columns import JobFilter
from hpcjobs.jobstats.sources import AccountingQuery, Sacct
from hpcjobs.site.models import Site

TODAY = datetime.now().replace(hour=15, minute=0, second=0, microsecond=0)
NOON = int((TODAY.replace(hour=12) - timedelta(days=4)).timestamp())


class Clusters:
    """sacct answers with the rows that ended in the time asked for, and counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: Sequence[Mapping[str, str]]) -> None:
        self.fake = FakeSacct(rows)
        monkeypatch.setattr(totals, "open_sacct", self._open)
        # Soon after midnight yesterday is open too, and one more question is asked.
        monkeypatch.setattr(time, "time", TODAY.timestamp)

    def _open(self, job_filter: JobFilter, site: Site) -> Sacct:
        query = AccountingQuery(site.name, job_filter.since, time.time(), job_filter.users)
        return Sacct(query, runner=self.fake.run, streamer=self._stream)

    def _stream(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]:
        begin, end = (
            datetime.fromisoformat(option.partition("=")[2]).timestamp()
            for option in argv
            if option.startswith(("--starttime", "--endtime"))
        )
        everything = self.fake.rows
        self.fake.rows = [one for one in everything if begin <= float(one["End"]) < end]
        yield from self.fake.stream(argv, env=env)
        self.fake.rows = everything

    def total(self, *by: str, since: float) -> tuple[int, list[dict[str, object]]]:
        before = len(self.fake.queries)
        table = totals.sum_by_group(JobFilter(since=since), by=by, site="tu-hpc").jobs
        return len(self.fake.queries) - before, table.sort(by).to_dicts()


def times(begin: int, seconds: int = 3600) -> dict[str, int]:
    return {"Submit": begin, "Eligible": begin, "Start": begin, "End": begin + seconds, "ElapsedRaw": seconds}


def jobs() -> list[dict[str, str]]:
    failed = row(JobID=1, State="NODE_FAIL", **times(NOON))
    again = row(JobID=1, **times(NOON + 3700, 86400))
    others = [row(JobID=n, JobIDRaw=n, User=f"user{n % 2}", **times(NOON + 86400 * (n % 4))) for n in range(2, 9)]
    lines = [failed, again, *others]
    return [line for one in lines for line in (one, step(one))]


@pytest.mark.parametrize("by", [("user",), ("user", "state"), ("day",)])
def test_a_second_report_asks_about_the_open_hours_alone_and_has_the_same_sums(
    here: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...]
) -> None:
    cluster = Clusters(monkeypatch, jobs())
    questions, first = cluster.total(*by, since=NOON)
    assert questions == 5
    questions, second = cluster.total(*by, since=NOON)
    assert questions == 2, "the first day is cut, and the last one is open"
    assert second == first
    assert sum(int(str(one["jobs"])) for one in first) == 8


def test_a_report_that_begins_before_what_is_kept_knows_which_attempts_were_put_back(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept from the second day on, the second attempt looks like a job; from the first day on it follows a failure."""
    cluster = Clusters(monkeypatch, jobs()[:4])
    _, late = cluster.total("user", since=NOON + 86400)
    _, early = cluster.total("user", since=NOON)
    assert [(one["jobs"], one["failed"]) for one in (*late, *early)] == [(1, 0), (1, 0)]
    _, late = cluster.total("user", since=NOON + 86400)
    assert [(one["jobs"], one["failed"]) for one in late] == [(1, 0)]


def test_a_job_whose_request_of_memory_is_unknown_adds_nothing_to_the_memory_efficiency(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = row(JobID=1, JobIDRaw=1, **times(NOON))
    unknown = row(JobID=2, JobIDRaw=2, ReqMem="0", ReqTRES="cpu=8", AllocTRES="cpu=8", **times(NOON))
    cluster = Clusters(monkeypatch, [known, step(known), unknown, step(unknown)])
    _, (one,) = cluster.total("user", since=NOON)
    assert one["mem_efficiency"] == 0.25


@pytest.mark.parametrize("earlier_first", [True, False])
def test_two_reports_that_begin_on_one_day_have_the_jobs_of_their_own_times(
    here: Path, monkeypatch: pytest.MonkeyPatch, earlier_first: bool
) -> None:
    ends = (3 * 3600, 5 * 3600, 30 * 3600)
    cluster = Clusters(
        monkeypatch, [row(JobID=n, JobIDRaw=n, **times(NOON + end - 3600)) for n, end in enumerate(ends)]
    )
    expected = {NOON + 2 * 3600: 3, NOON + 4 * 3600: 2}
    for since in sorted(expected, reverse=not earlier_first) * 2:
        _, ((one),) = cluster.total("user", since=since)
        assert one["jobs"] == expected[since], since


def test_sums_of_two_filters_are_kept_apart(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Clusters(monkeypatch, jobs())
    _, everybody = cluster.total("user", since=NOON)
    table = totals.sum_by_group(JobFilter(since=NOON, account="other"), by=["user"], site="tu-hpc").jobs
    assert len(everybody) == 3
    assert table.is_empty()
