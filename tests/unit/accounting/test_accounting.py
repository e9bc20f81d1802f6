"""What sacct prints becomes the right numbers, or is counted and named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from sacct_versions import BEGUN, DATA, SEPARATOR, FakeSacct, printed, row, step

from hpcjobs.errors import SchedulerError
from hpcjobs.jobstats.columns import COLUMNS, SACCT_COLUMNS, Doubts, choose
from hpcjobs.jobstats.dataframe import to_pandas
from hpcjobs.jobstats.derive import derive, merge_attempts, number_uses
from hpcjobs.jobstats.fold import fold
from hpcjobs.jobstats.sources import AccountingQuery, Sacct, frames
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.slurm.parse import Table
from hpcjobs.site.models import NodeShape, Partition, Prices, Site, Watts

GIB = 1 << 30
SITE = Site(
    name="uni",
    partitions={"compute": Partition(node=NodeShape(cpus=8), nodes=4)},
    prices=Prices(cpu_hour=0.01, node_hour=0.5),
    watts=Watts(cpu=6.0, node_idle=90.0),
)


def jobs_of(blocks: Iterable[bytes], columns: Iterable[str] = SACCT_COLUMNS, *, separator: str = SEPARATOR,
            site: Site = SITE) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:  # fmt: skip
    """Job id -> row, and kind of doubt -> how many."""
    doubts = Doubts()
    parts = list(fold(frames(blocks, Table(tuple(columns), separator), doubts), doubts))
    frame = merge_attempts(number_uses(derive(pl.concat(parts), site))) if parts else pl.DataFrame()
    return {one["job_id"]: one for one in frame.to_dicts()}, {d.kind: d.rows for d in doubts.by_frequency()}


def one(*rows: dict[str, str], site: Site = SITE) -> dict[str, Any]:
    job_rows, doubts = jobs_of([printed(rows, SACCT_COLUMNS, SEPARATOR)], site=site)
    assert doubts == {}
    (job,) = job_rows.values()
    return job


def recorded(version: str = "22.05.8") -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    columns = choose((DATA / f"recorded-{version}.helpformat").read_text())
    return jobs_of([(DATA / f"recorded-{version}.txt").read_bytes()], columns)


def test_the_recorded_accounting_of_22_05_gives_every_job_once_and_no_doubt() -> None:
    jobs, doubts = recorded()
    assert doubts == {}
    ids = {"1", "2", "3_0", "3_1", "3_2", "4_[5-9]", "5+0", "5+1", "7", "8", "9", "10", "11", "12", "13"}
    assert set(jobs) == ids
    assert jobs["1"]["name"] == "na|me with nl"
    assert jobs["10"]["name"] == "sep inname"
    assert (jobs["11"]["name"], jobs["12"]["name"]) == ("Unknown", "None")
    assert jobs["7"]["state"] == "CANCELLED"
    assert (jobs["8"]["exit_code"], jobs["8"]["signal"]) == (0, 9)
    assert jobs["9"]["state"] == "TIMEOUT"
    assert (jobs["4_[5-9]"]["state"], jobs["4_[5-9]"]["started"]) == ("PENDING", None)


def test_the_recorded_job_on_two_nodes_has_the_memory_of_all_its_tasks() -> None:
    """Four tasks of 223,535,104 bytes at most, 894,062,592 together, beside a batch script of 13,389,824."""
    job = recorded()[0]["1"]
    assert job["max_rss_bytes"] == 223_535_104
    assert job["mem_used_bytes"] == 894_062_592 + 13_389_824
    assert job["mem_per_node_bytes"] == 2 * 223_535_104 + 13_389_824
    assert job["mem_requested_bytes"] == 2 * GIB
    assert (job["nodes"], job["cpus"], job["tasks"], job["cpu_s"]) == (2, 4, 4, 4.922)


def test_the_recorded_requeue_is_one_job_of_two_attempts() -> None:
    """Six seconds, requeued, then four: the first six are lost."""
    job = recorded()[0]["2"]
    assert (job["attempts"], job["elapsed_all_s"], job["elapsed_s"], job["lost_s"]) == (2, 10, 4, 6.0)
    assert job["goodput"] == pytest.approx(0.4)


OTHERS = sorted({path.stem.removeprefix("recorded-") for path in DATA.glob("recorded-*.txt")} - {"22.05.8"})


@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_recorded_tell_the_same_kinds_of_jobs(version: str) -> None:
    jobs, doubts = recorded(version)
    assert (len(jobs), doubts) == (13, {})
    named: dict[str, list[dict[str, Any]]] = {}
    for job in jobs.values():
        named.setdefault(job["name"].replace("\x1f", " ").replace("\n", " "), []).append(job)
    steps = "FAILED" if version == "21.08.5" else "COMPLETED"  # recorded where srun had no pmix
    assert {name: [job["state"] for job in job_rows] for name, job_rows in named.items()} == {
        "hello": [steps], "bad": ["FAILED"], "na|me with nl": ["FAILED"], "rq": ["COMPLETED"],
        "arr": ["COMPLETED", "FAILED", "FAILED", "FAILED"], "sep ed": ["CANCELLED"],
        "None": ["TIMEOUT"], "Unknown": ["FAILED"], "het": [steps, steps],
    }  # fmt: skip
    assert [job["exit_code"] for job in named["arr"]] == [0, 1, 2, 3]
    assert named["Unknown"][0]["signal"] == 9
    assert (named["rq"][0]["attempts"], named["rq"][0]["lost_s"] > 0) == (2, True)
    assert 60 <= named["None"][0]["elapsed_s"] < 120
    if steps == "COMPLETED":
        assert (named["bad"][0]["exit_code"], named["bad"][0]["nodes"], named["bad"][0]["tasks"]) == (7, 2, 4)
        assert named["na|me with nl"][0]["mem_used_bytes"] > 4 * 150e6


def test_blocks_may_end_anywhere() -> None:
    """A record, a name with a newline, a job and its steps: cut at every byte, the same table."""
    data = (DATA / "recorded-22.05.8.txt").read_bytes()
    columns = choose((DATA / "recorded-22.05.8.helpformat").read_text())
    complete = jobs_of([data], columns)
    for size in (1, 7, 61, 997):
        assert jobs_of([data[at : at + size] for at in range(0, len(data), size)], columns) == complete


def test_efficiency_energy_and_cost_follow_their_formulas() -> None:
    job = one(row(), step(row()))
    assert job["cpu_efficiency"] == 14400 / (8 * 3600)
    assert job["mem_efficiency"] == 4 / 16
    assert job["energy_j"] == (8 * 6 + 90) * 3600
    assert job["energy_source"] == "modelled"
    assert job["cost"] == pytest.approx(8 * 0.01 + 0.5)
    assert (job["queue_wait_s"], job["held_s"], job["time_limit_s"]) == (60, 0, 7200)


def test_measured_energy_counts_only_for_a_job_alone_on_its_nodes() -> None:
    """Node counters cannot tell two jobs apart; overflowed ones say nothing."""
    alone = one(row(ConsumedEnergyRaw=500_000))
    assert (alone["energy_j"], alone["energy_source"]) == (500_000, "measured")
    for shared in (row(ConsumedEnergyRaw=500_000, NCPUS=4), row(ConsumedEnergyRaw=18446744073709551614)):
        assert one(shared)["energy_source"] == "modelled"


def test_memory_per_cpu_of_20_11_is_of_all_cpus() -> None:
    old = {"AllocTRES": "", "ReqTRES": ""}
    assert one(row(ReqMem="2000Mc", **old))["mem_requested_bytes"] == 8 * 2000 << 20
    assert one(row(ReqMem="4Gn", NNodes=2, **old))["mem_requested_bytes"] == 8 * GIB


def test_memory_without_a_suffix_is_of_the_whole_job() -> None:
    """Since 21.08; 4 nodes with 312.5G together."""
    mem_bytes = one(row(ReqMem="320000M", NNodes=4, AllocTRES="", ReqTRES=""))["mem_requested_bytes"]
    assert mem_bytes == 320000 << 20


def test_memory_leaves_out_what_slurms_own_extern_step_used() -> None:
    job = row()
    extern = step(job, "extern", NTasks=1, TRESUsageInTot=f"mem={GIB // 2}", MaxRSS=8 * GIB)
    job_rows = one(job, step(job, "batch", NTasks=1, TRESUsageInTot=f"mem={GIB}"), extern, step(job))
    assert (job_rows["mem_used_bytes"], job_rows["mem_per_node_bytes"], job_rows["max_rss_bytes"]) == (
        5 * GIB,
        5 * GIB,
        GIB,
    )


def test_a_version_that_samples_no_totals_gives_the_same_memory() -> None:
    """AveRSS x tasks, then MaxRSS x tasks; sizes with units are read too."""
    assert one(row(), step(row(), TRESUsageInTot=""))["mem_used_bytes"] == 4 * GIB
    assert one(row(), step(row(), TRESUsageInTot="", AveRSS="", MaxRSS="1048576K"))["mem_used_bytes"] == 4 * GIB


def test_gpus_and_their_use_are_read_where_the_site_gathers_them() -> None:
    """25.05 with gres/gpuutil: mean over steps by their length; typed and untyped counts are not added up. Slurm adds
    up the GPUs of a process: four tasks of 45 % each on two GPUs are 90 %."""
    job = row(AllocTRES="cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=16384M,node=1")
    begin, middle, end = (int(job["Start"]) + seconds for seconds in (0, 3000, 3600))
    long = step(job, "0", Start=begin, End=middle, ElapsedRaw=3000, TRESUsageInAve="gres/gpumem=2G,gres/gpuutil=45")
    short = step(job, "1", Start=middle, End=end, ElapsedRaw=600, TRESUsageInAve="gres/gpumem=1G,gres/gpuutil=30",
                 TRESUsageInTot="gres/gpumem=8G,gres/gpuutil=60,mem=1G")  # fmt: skip
    job_rows = one(job, long, short)
    assert job_rows["gpus"] == 2
    assert job_rows["gpu_utilization"] == pytest.approx((0.9 * 3000 + 0.3 * 600) / 3600)
    assert job_rows["gpu_mem_bytes"] == 8 * GIB
    assert one(row(AllocTRES="gres/gpu:a100=2,gres/gpu:h100=1"))["gpus"] == 3


def test_one_process_on_four_gpus_does_not_use_them_by_360_percent() -> None:
    job = row(AllocTRES="cpu=8,gres/gpu=4,mem=16384M,node=1")
    usage = "gres/gpumem=8G,gres/gpuutil=360"
    job_rows = one(job, step(job, NTasks=1, TRESUsageInAve=usage, TRESUsageInTot=usage))
    assert job_rows["gpu_utilization"] == pytest.approx(0.9)


def test_gpus_that_a_step_used_fully_are_not_called_idle_for_the_rows_of_slurm_itself() -> None:
    """The batch script and Slurm's extern step gather 0 % for as long as the job runs."""
    job = row(AllocTRES="cpu=8,gres/gpu=4,mem=16384M,node=1")
    idle = {"NTasks": 1, "TRESUsageInTot": "gres/gpumem=0,gres/gpuutil=0", "TRESUsageInAve": "gres/gpuutil=0"}
    batch, extern = step(job, "batch", **idle), step(job, "extern", **idle)
    four = step(job, NTasks=4, TRESUsageInTot="gres/gpuutil=380", TRESUsageInAve="gres/gpuutil=95")
    assert one(job, batch, extern, four)["gpu_utilization"] == pytest.approx(0.95)
    watcher = step(job, "1", **idle)
    assert one(job, batch, extern, four, watcher)["gpu_utilization"] == pytest.approx(0.95)
    by_script = step(job, "batch", NTasks=1, TRESUsageInTot="gres/gpuutil=200", TRESUsageInAve="gres/gpuutil=200")
    assert one(job, by_script, extern)["gpu_utilization"] == pytest.approx(0.5)
    assert one(job, batch, extern)["gpu_utilization"] == 0


def test_a_step_without_gpus_beside_one_that_has_them_leaves_none_idle() -> None:
    job = row(AllocTRES="cpu=8,gres/gpu=2,mem=16384M,node=1")
    half = {"ElapsedRaw": 1800, "NTasks": 1}
    idle = {"TRESUsageInTot": "mem=1G,gres/gpuutil=0", "TRESUsageInAve": "gres/gpuutil=0"}
    first = step(job, "0", AllocTRES="cpu=8,mem=16384M,node=1", End=BEGUN + 1860, **half, **idle)
    tres = {"TRESUsageInTot": "mem=1G,gres/gpuutil=200", "TRESUsageInAve": "gres/gpuutil=200"}
    second = step(job, "1", Start=BEGUN + 1860, AllocTRES="cpu=8,gres/gpu=2,node=1", **half, **tres)
    assert one(job, first, second)["gpu_utilization"] == pytest.approx(1.0)


def test_a_node_holds_no_more_than_all_tasks_together() -> None:
    """One task of 8 GiB and fifteen of 1 GiB on one node."""
    job = row(ReqMem="200G")
    step_of_16 = step(job, NTasks=16, MaxRSS=8 * GIB, AveRSS="", TRESUsageInTot=f"mem={23 * GIB}")
    assert one(job, step_of_16)["mem_per_node_bytes"] == 23 * GIB
    assert one(job, step(job, MaxRSS=8 * GIB, TRESUsageInTot=""))["mem_per_node_bytes"] == 4 * 8 * GIB


def test_gpu_use_is_weighted_by_time_and_gpus_and_idle_steps_of_their_own_count() -> None:
    job = row(AllocTRES="cpu=8,gres/gpu=4,mem=16384M,node=1")
    start, end = BEGUN + 60, BEGUN + 3660

    def used(number: int, gpus: int, share: float, **times: int) -> dict[str, str]:
        usage = f"gres/gpuutil={gpus * share:g}"
        return step(job, str(number), NTasks=1, AllocTRES=f"gres/gpu={gpus}", TRESUsageInTot=usage, **times)

    parallel = (used(0, 1, 90), used(1, 3, 50))
    assert one(job, *parallel)["gpu_utilization"] == pytest.approx((90 + 3 * 50) / 400)
    half = {"ElapsedRaw": 1800}
    preparing, training = used(0, 4, 0, End=start + 1800, **half), used(1, 4, 80, Start=end - 1800, **half)
    assert one(job, preparing, training)["gpu_utilization"] == pytest.approx(0.4)


def test_memory_of_steps_that_ran_at_once_adds_up_and_that_of_others_does_not() -> None:
    job = row()
    start = BEGUN + 60
    size = {"NTasks": 1, "MaxRSS": 509 << 20, "AveRSS": 509 << 20, "TRESUsageInTot": f"mem={509 << 20}"}
    at_once = [step(job, str(n), **size) for n in range(4)]
    assert one(job, *at_once)["mem_used_bytes"] == one(job, *at_once)["mem_per_node_bytes"] == 4 * 509 << 20
    in_turn = [step(job, str(n), Start=start + 900 * n, End=start + 900 * (n + 1), **size) for n in range(4)]
    assert one(job, *in_turn)["mem_used_bytes"] == 509 << 20
    brief = [step(job, str(n), Start=start, End=start, **size) for n in range(2)]
    assert one(job, *brief)["mem_used_bytes"] == 2 * 509 << 20
    running = [step(job, str(n), Start=start + n, End="Unknown", **size) for n in range(2)]
    assert one(row(), *running)["mem_used_bytes"] == 2 * 509 << 20


def test_hostile_names_change_nothing_but_the_name() -> None:
    """Separators, newlines, quotes, a whole forged row: nobody knows the separator beforehand."""
    forged = printed([row(JobID=666, User="victim")], SACCT_COLUMNS, "\x1f").decode()
    for name in ("a|b", 'q"uo"te', "tab\there", "काम", f"x\n{forged}y", "\x1f" * 40, "\n\n\n", "a\r\nb", "None"):
        job = one(row(JobName=name), step(row()))
        assert (job["job_id"], job["user"], job["elapsed_s"], job["steps"]) == ("7", "ana", 3600, 1)


def test_bytes_that_are_no_utf8_spoil_only_their_name() -> None:
    data = printed([row(), row(JobID=8)], SACCT_COLUMNS, SEPARATOR).replace(b"train", b"tr\xe4in", 1)
    jobs, doubts = jobs_of([data])
    assert (set(jobs), doubts) == ({"7", "8"}, {})
    assert jobs["7"]["name"] == "tr�in"


def test_doubtful_rows_are_counted_and_named_and_the_others_stay() -> None:
    good, orphan = row(JobID=1), step(row(JobID=99))
    rows = [orphan, good, row(JobID=2, State="EXPLODED"), row(JobID=3, NCPUS="many"), row(JobID="", JobName="?"),
            row(JobID=4, End=BEGUN), step(row(JobID=5))]  # fmt: skip
    jobs, doubts = jobs_of([printed(rows, SACCT_COLUMNS, SEPARATOR)])
    assert set(jobs) == {"1", "2", "3", "4"}
    assert jobs["2"]["state"] == "UNKNOWN"
    assert jobs["3"]["cpus"] is None
    assert (jobs["4"]["ended"], jobs["4"]["elapsed_s"]) == (None, None)
    assert doubts == {
        "step without its job": 2, "unknown state": 1, "NCPUS is no number": 1, "no job id": 1,
        "ends before it starts": 1,
    }  # fmt: skip


def test_a_truncated_answer_loses_its_last_row_only_and_says_so() -> None:
    data = printed([row(), row(JobID=8), row(JobID=9)], SACCT_COLUMNS, SEPARATOR)
    jobs, doubts = jobs_of([data[:-40]])
    assert (set(jobs), doubts) == ({"7", "8"}, {"truncated": 1})


def test_output_with_a_plain_separator_is_read_and_what_it_cannot_tell_apart_is_left_out() -> None:
    rows = [row(), row(JobID=8, JobName="a|b"), row(JobID=9, JobName="two\nlines"), row(JobID=10)]
    jobs, doubts = jobs_of([printed(rows, SACCT_COLUMNS, "|")], separator="|")
    assert set(jobs) == {"7", "9", "10"}
    assert doubts == {"not the columns asked for": 1, "put together from several lines": 1}


def test_nothing_is_nothing() -> None:
    assert jobs_of([]) == ({}, {})
    assert jobs_of([b""]) == ({}, {})


@pytest.mark.parametrize("lacks", [("TRESUsageInAve",), ("Restarts",), ("ConsumedEnergyRaw", "AveRSS", "QOS")])
def test_columns_a_version_lacks_are_null_and_the_rest_is_read(lacks: tuple[str, ...]) -> None:
    fake = FakeSacct([row(), step(row())], lacks=lacks)
    (job,) = query_jobs(fake).to_dicts()
    assert (job["job_id"], job["mem_used_bytes"], job["cpus"]) == ("7", 4 * GIB, 8)
    (argv,) = fake.queries
    assert not {*lacks} & set(next(w for w in argv if w.startswith("--format")).partition("=")[2].split(","))


def test_a_version_without_what_no_report_can_do_without_is_refused_by_name() -> None:
    with pytest.raises(SchedulerError, match="ElapsedRaw"):
        query_jobs(FakeSacct([row()], lacks=("ElapsedRaw",)))


def query_jobs(fake: FakeSacct, *, since: float = BEGUN, until: float = BEGUN + 4000) -> pl.DataFrame:
    question = AccountingQuery("uni", since, until, users=("ana",))
    return pl.concat(list(Sacct(question, runner=fake.run, streamer=fake.stream).attempts(Doubts())))


def test_closed_days_are_asked_for_once(here: Path) -> None:
    """Three days that are long over: three questions, then one about what had not ended on the last, and the same
    answer."""
    first, second = FakeSacct([row(), step(row())]), FakeSacct([])
    before = query_jobs(first, until=BEGUN + 2 * 86400)
    after = query_jobs(second, until=BEGUN + 2 * 86400)
    assert len(first.queries) == 3
    assert len(second.queries) == 1
    assert after.to_dicts() == before.to_dicts()
    assert len(before) == 1


def test_a_past_period_has_the_same_jobs_whenever_it_is_asked_for(here: Path) -> None:
    """With ``until`` in the past: a job that still runs, one that ended after the last day, and one within it."""
    end = BEGUN + 86400
    rows = [
        row(JobID=1),
        row(JobID=2, End=BEGUN + 5 * 86400, ElapsedRaw=5 * 86400 - 60),
        row(JobID=3, State="RUNNING", End="Unknown"),
    ]
    for _ in range(2):
        fake = FakeSacct(rows)
        job_rows = query_jobs(fake, until=end)
        assert sorted(job_rows["job_id"]) == ["1", "2", "3"]


@pytest.mark.parametrize("text", ["LAUNCH_FAILED", "RECONFIG_FAIL"])
def test_a_launch_that_failed_is_an_end_and_no_unknown_state(text: str) -> None:
    assert one(row(State=text))["state"] == text
    assert State.parse(text).ended


def test_an_id_that_is_given_out_again_is_another_job() -> None:
    """A day later, of the same name and user: the counter was reset. A requeue is submitted as the first one ends."""
    first = row(State="NODE_FAIL")
    day = 86400
    reused = row(Submit=BEGUN + day, Start=BEGUN + day, End=BEGUN + day + 3600)
    requeued = row(Submit=BEGUN + 3661, Eligible=BEGUN + 3661, Start=BEGUN + 3700, End=BEGUN + 7300)
    assert one(first, requeued)["attempts"] == 2
    doubts = Doubts()
    data = printed([first, reused], SACCT_COLUMNS, SEPARATOR)
    parts = list(fold(frames([data], Table(SACCT_COLUMNS, SEPARATOR), doubts), doubts))
    merged = merge_attempts(number_uses(derive(pl.concat(parts), SITE)))
    assert merged["attempts"].to_list() == [1, 1]
    assert merged["lost_s"].to_list()[1] == 0


def test_a_last_attempt_that_its_node_ended_is_lost_as_an_only_one_is() -> None:
    first = row(State="PREEMPTED")
    last = row(State="NODE_FAIL", Submit=BEGUN + 3661, Eligible=BEGUN + 3661, Start=BEGUN + 3700, End=BEGUN + 7300)
    for rows in ([last], [first, last]):
        job = one(*rows)
        assert job["lost_s"] == job["elapsed_all_s"] > 0
        assert job["goodput"] == 0


def test_sums_of_unknown_values_are_unknown() -> None:
    """A requeued job of a site without prices and watts cost ``0.00 None``."""
    bare = Site(name="bare", partitions=SITE.partitions)
    rows = (row(State="REQUEUED"), row(Submit=BEGUN + 3660, Start=BEGUN + 3660, End=BEGUN + 7260))
    job = one(*rows, site=bare)
    assert (job["attempts"], job["cost"], job["energy_j"]) == (2, None, None)


def test_every_column_is_documented_and_has_its_type_in_pandas() -> None:
    frame = to_pandas(derive(pl.concat(list(fold(_parts(), Doubts()))), SITE))
    assert list(frame.columns) == list(COLUMNS)
    assert str(frame["submitted"].dtype).endswith("UTC]")
    assert str(frame["elapsed_s"].dtype) == "Int64"
    assert frame["submitted"][0].timestamp() == BEGUN
    page = (Path(__file__).parents[3] / "docs" / "reports.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"| `{name}` |" not in page] == []


def _parts() -> Iterable[pl.DataFrame]:
    return frames([printed([row()], SACCT_COLUMNS, SEPARATOR)], Table(SACCT_COLUMNS, SEPARATOR), Doubts())
