"""Running jobs have what sstat measures, or nothing: never 0 %."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import pytest
from sacct_versions import BEGUN, SEPARATOR, printed, row, step

from hpcjobs.errors import CommandMissingError
from hpcjobs.jobstats.columns import SACCT_COLUMNS, Doubts
from hpcjobs.jobstats.derive import derive
from hpcjobs.jobstats.fold import fold
from hpcjobs.jobstats.sources import frames
from hpcjobs.jobstats.totals import totals
from hpcjobs.jobstats.usage import add_running_usage
from hpcjobs.processes.programs import Result
from hpcjobs.scheduler.slurm.parse import Table
from hpcjobs.site.models import NodeShape, Partition, Site

SITE = Site(name="uni", partitions={"compute": Partition(node=NodeShape(cpus=8), nodes=4)})
LIVE = {"State": "RUNNING", "End": "Unknown", "TotalCPU": "00:00:00", "ElapsedRaw": 600}


class FakeSstat:
    """Answers like sstat of 22.05: a line per step that runs now."""

    def __init__(self, out: str = "", code: int = 0) -> None:
        self.out, self.code = out, code
        self.queries: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        self.queries.append(argv)
        return Result(self.code, self.out, "")


def folded(*rows: Mapping[str, str]) -> pl.DataFrame:
    doubts = Doubts()
    blocks = [printed(rows, SACCT_COLUMNS, SEPARATOR)]
    return pl.concat(list(fold(frames(blocks, Table(SACCT_COLUMNS, SEPARATOR), doubts), doubts)))


def test_a_running_job_is_not_idle_because_nobody_measured_it() -> None:
    jobs = derive(add_running_usage(folded(row(**LIVE)), slurm_conf=None, runner=FakeSstat(code=1)), SITE)
    (job,) = jobs.to_dicts()
    assert (job["cpu_s"], job["cpu_efficiency"], job["mem_used_bytes"], job["mem_efficiency"]) == (None,) * 4
    assert totals([jobs])["cpu_efficiency"].to_list() == [None]


def test_running_jobs_have_what_sstat_and_their_ended_steps_tell() -> None:
    """Ten minutes on 8 CPUs: a step of 1,000 s of CPU time has ended, one of 1,400 runs beside the batch script's."""
    live = row(**LIVE)
    ended = step(live, TotalCPU="16:40", State="COMPLETED", End=BEGUN + 100, TRESUsageInTot="mem=1", MaxRSS="1")
    sstat = FakeSstat(
        "7.1|1048576|cpu=00:23:20,energy=0,mem=4194304\n7.batch|1024|cpu=00:00:00,mem=1024\n"
        "7.extern|9999999|cpu=00:00:00,mem=9999999\n"
    )
    (job,) = derive(add_running_usage(folded(live, ended), slurm_conf=None, runner=sstat), SITE).to_dicts()
    assert job["cpu_s"] == 2400
    assert job["cpu_efficiency"] == pytest.approx(2400 / 4800)
    assert (job["mem_used_bytes"], job["max_rss_bytes"]) == (4194304 + 1024, 1048576)


def test_a_running_job_has_held_what_its_ended_steps_held() -> None:
    live = row(**LIVE)
    ended = step(live, State="COMPLETED", End=BEGUN + 100, TRESUsageInTot="mem=8388608", MaxRSS="2097152")
    sstat = FakeSstat("7.1|1048576|cpu=00:00:01,mem=4194304\n")
    (job,) = derive(add_running_usage(folded(live, ended), slurm_conf=None, runner=sstat), SITE).to_dicts()
    assert (job["mem_used_bytes"], job["max_rss_bytes"]) == (8388608, 2097152)
    assert "--jobs=7" in sstat.queries[0]


def test_without_sstat_the_accounting_is_told_all_the_same() -> None:
    def missing(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        raise CommandMissingError("sstat: not found on PATH")

    frame = add_running_usage(folded(row(**LIVE)), slurm_conf=None, runner=missing)
    assert frame["cpu_s"].to_list() == [None]


def test_sstat_is_not_asked_about_many_jobs_or_none() -> None:
    sstat = FakeSstat()
    add_running_usage(folded(row()), slurm_conf=None, runner=sstat)
    add_running_usage(folded(*(row(JobID=n, JobIDRaw=n, **LIVE) for n in range(100))), slurm_conf=None, runner=sstat)
    assert sstat.queries == []


def test_an_accounting_that_measures_nothing_tells_no_efficiency() -> None:
    """Without jobacct_gather TotalCPU is exactly 0; the shortest process takes a millisecond."""
    (silent,) = derive(folded(row(TotalCPU="00:00:00")), SITE).to_dicts()
    (short,) = derive(folded(row(TotalCPU="00:00.003")), SITE).to_dicts()
    assert (silent["cpu_efficiency"], short["cpu_s"]) == (None, 0.003)
