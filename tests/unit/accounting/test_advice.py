"""What to ask for next time; what a requeued job lost; which days are asked for."""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from hpcjobs.jobstats.cache import closed_until, days
from hpcjobs.jobstats.derive import SCHEMA
from hpcjobs.jobstats.totals import totals
from hpcjobs.jobstats.usage import JobUsage, add_goodput, advise, read_lasting_s

GIB = 1 << 30


def usage(**values: Any) -> JobUsage:
    return JobUsage.from_row(job(**values))


def job(**values: Any) -> dict[str, Any]:
    usual = {"job_id": "1", "state": "COMPLETED", "nodes": 1, "cpus": 8, "tasks": 8, "gpus": 0, "elapsed_s": 3600,
             "mem_requested_bytes": 64 * GIB, "mem_per_node_bytes": 3 * GIB, "time_limit_s": 7200,
             "cpu_efficiency": 0.95, "attempts": 1, "elapsed_all_s": 3600}  # fmt: skip
    return {**dict.fromkeys(SCHEMA), **usual, **values}


def test_64_gb_asked_and_3_used_is_4() -> None:
    (advice,) = advise(usage())
    assert str(advice) == "requested 64G of memory per node, used 3G at most: --mem=4G"


@pytest.mark.parametrize(
    ("values", "option", "value"),
    [
        ({"mem_requested_bytes": 8 * GIB, "state": "OUT_OF_MEMORY"}, "--mem", "16G"),
        ({"mem_requested_bytes": 4 * GIB, "time_limit_s": 86400}, "--time", "01:30:00"),
        ({"mem_requested_bytes": 4 * GIB, "state": "TIMEOUT"}, "--time", "04:00:00"),
        ({"mem_requested_bytes": 4 * GIB, "cpus": 32, "cpu_efficiency": 0.26}, "--cpus-per-task", "2"),
        ({"mem_requested_bytes": 4 * GIB, "gpus": 4, "gpu_utilization": 0.2}, "--gpus-per-node", "1"),
    ],
)
def test_each_kind_of_waste_has_its_option(values: dict[str, Any], option: str, value: str) -> None:
    assert [(advice.option, advice.value) for advice in advise(usage(**values))] == [(option, value)]


@pytest.mark.parametrize("values", [{"state": "FAILED"}, {"elapsed_all_s": 20}, {"mem_per_node_bytes": 40 * GIB},
                                    {"mem_per_node_bytes": None}, {"mem_requested_bytes": None},
                                    {"mem_requested_bytes": 4 * GIB, "gpus": 2, "gpu_utilization": 0.5}])  # fmt: skip
def test_nothing_is_advised_from_what_says_nothing(values: dict[str, Any]) -> None:
    assert advise(usage(**values)) == []


def test_what_a_later_attempt_built_on_is_not_lost(here: Path) -> None:
    """100 s until it was requeued, of which it went on from second 70: 30 are lost."""
    lines = [{"kind": "run", "time_s": 0.1}, {"kind": "step", "time_s": 70.0}, {"kind": "run", "time_s": 0.1},
             {"kind": "end", "time_s": 50.0}]  # fmt: skip
    (here / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    assert read_lasting_s(here) == [70.0, 50.0]
    row = job(attempts=2, elapsed_all_s=160, elapsed_s=60, lost_s=100.0, goodput=0.375, run_dir=str(here))
    rows = add_goodput(pl.DataFrame([row], schema=SCHEMA, orient="row")).to_dicts()[0]
    assert (rows["lost_s"], rows["goodput_source"]) == (30.0, "checkpoints")
    assert rows["goodput"] == pytest.approx(130 / 160)


@pytest.mark.parametrize("time_s", ["soon", None, [], 1e999, -5, {}])
def test_a_line_of_metrics_with_an_odd_time_does_not_count(here: Path, time_s: object) -> None:
    lines = [{"kind": "run", "time_s": 0.1}, {"kind": "step", "time_s": 70.0}, {"kind": "step", "time_s": time_s}]
    (here / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_lasting_s(here) == [70.0]


def test_sums_weigh_efficiency_by_time() -> None:
    long = job(user="ana", cpu_s=8 * 3600 * 0.5, elapsed_s=3600)
    short = job(user="ana", cpu_s=8 * 60.0, elapsed_s=60)
    at_once = job(user="ana", cpu_s=0.4, elapsed_s=0)  # its own efficiency is not known either
    other = job(user="bo", cpu_s=None)
    parts = [pl.DataFrame([row], schema=SCHEMA, orient="row") for row in (long, short, at_once, other)]
    rows = {row["user"]: row for row in totals(parts, by="user").to_dicts()}
    assert rows["ana"]["cpu_efficiency"] == pytest.approx((1800 + 60) / 3660, rel=1e-9)
    assert rows["ana"]["jobs"] == 3
    assert rows["bo"]["cpu_efficiency"] is None


def rows_of(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=SCHEMA, orient="row")


def attempt(job_id: str, state: str, begin: int, **values: Any) -> dict[str, Any]:
    times = {"submitted": begin, "started": begin, "ended": begin + 3600}
    return job(job_id=job_id, user="ana", name="train", state=state, **times, **values)


@pytest.mark.parametrize("state", ["REQUEUED", "PREEMPTED", "NODE_FAIL"])
@pytest.mark.parametrize("days", [1, 2], ids=["one day", "over midnight"])
def test_an_attempt_that_was_put_back_is_no_job_of_its_own(state: str, days: int) -> None:
    """And no failed one; a node failure that ended its job is one."""
    first, second = attempt("1", state, 0), attempt("1", "COMPLETED", 3600)
    final = attempt("2", "NODE_FAIL", 7200)
    parts = [rows_of(first, second, final)] if days == 1 else [rows_of(first), rows_of(second, final)]
    (row,) = totals(parts, by="user").to_dicts()
    assert (row["jobs"], row["failed"]) == (2, 1)
    assert row["cpu_h"] == 24


def test_sums_of_what_nobody_knows_are_unknown_and_not_zero() -> None:
    (row,) = totals([rows_of(job()), rows_of(job())]).to_dicts()
    assert (row["energy_kwh"], row["cost"]) == (None, None)
    (row,) = totals([rows_of(job(cost=1.5)), rows_of(job())]).to_dicts()
    assert row["cost"] == 1.5


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time of a place that changes its clocks."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_a_job_counts_on_the_local_day_of_its_end() -> None:
    """23:30 UTC is half past midnight of the next day."""
    end = calendar.timegm((2025, 1, 15, 23, 30, 0))
    result = totals([rows_of(job(ended=end)), rows_of(job())], by="day")
    assert sorted(result["day"]) == ["2025-01-16", "not ended"]


@pytest.mark.usefixtures("berlin")
def test_days_are_local_and_follow_one_another_over_a_change_of_clocks() -> None:
    """26 October 2025 has 25 hours in Berlin."""
    since = time.mktime((2025, 10, 25, 12, 0, 0, 0, 0, -1))
    now = time.mktime((2025, 10, 27, 1, 0, 0, 0, 0, -1))
    every = list(days(since, now, now=now))
    assert [time.localtime(day.begin).tm_mday for day in every] == [25, 26, 27]
    assert [day.end <= closed_until(now) for day in every] == [True, False, False]
    assert all(a.end == b.begin for a, b in pairwise(every))
    assert every[1].end - every[1].begin == 25 * 3600
