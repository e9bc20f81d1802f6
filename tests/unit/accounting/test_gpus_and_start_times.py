"""GPU figures from the trainers' own monitor, and what advice does to the wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from hpcjobs.job.plan import plan
from hpcjobs.jobstats.derive import SCHEMA
from hpcjobs.jobstats.usage import add_gpu_usage, read_gpu_usage
from hpcjobs.processes.programs import Result
from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.monitor import SCHEMA as MONITOR_SCHEMA
from hpcjobs.record.monitor import Load
from hpcjobs.run import folder
from hpcjobs.scaling.right_size import estimate_starts
from hpcjobs.site.models import NodeShape, Partition, Site, Watts

GIB = float(1 << 30)
SITE = Site(name="uni", scheduler="local", watts=Watts(cpu=6.0, gpu=300.0, node_idle=90.0))
CLUSTER = Site(name="c", partitions={"p": Partition(node=NodeShape(cpus=8), nodes=4)})


def monitored(run_dir: Path, node: int, *samples: Load) -> None:
    """A node's samples, a second apart, as a trainer writes them."""
    log = MetricsLog(run_dir / ("monitor.jsonl" if node == 0 else f"monitor-{node}.jsonl"))
    log.write("monitor", schema=MONITOR_SCHEMA, host=f"n{node}", interval_s=1.0, started_at=0.0)
    for second, sample in enumerate(samples, 1):
        log.write("sample", time_s=float(second), **sample._asdict())
    log.close()


def busy(percent: float, memory: float = GIB, watts: float | None = 500.0) -> Load:
    return Load(cpu_percent=50.0, gpu_percent=percent, gpu_memory_bytes=memory, gpu_power_w=watts)


def read_row(run_dir: Path, **values: Any) -> dict[str, Any]:
    usual = {"job_id": "7", "gpus": 2, "nodes": 2, "elapsed_s": 2, "attempts": 1, "energy_j": 10_000.0}
    row = dict.fromkeys(SCHEMA) | usual | {"energy_source": "modelled", "run_dir": str(run_dir)} | values
    return add_gpu_usage(pl.DataFrame([row], schema=SCHEMA, orient="row"), SITE).to_dicts()[0]


def test_the_monitor_of_every_node_comes_before_the_accounting(here: Path) -> None:
    """Two nodes of two samples; mean use, peaks added up; 10 kJ modelled, of which 1.2 were the two GPUs'."""
    monitored(here, 0, busy(90), busy(70, 3 * GIB))
    monitored(here, 1, busy(40), busy(0, 2 * GIB))
    row = read_row(here, gpu_utilization=0.1, gpu_mem_bytes=5, gpu_source="sacct")
    assert (row["gpu_utilization"], row["gpu_mem_bytes"], row["gpu_source"]) == (0.5, 5 * (1 << 30), "monitor")
    assert (row["energy_j"], row["energy_source"]) == (4 * 500 + 10_000 - 2 * 300 * 2, "nvml")


def test_the_energy_of_a_run_that_was_sampled_in_part_stays_modelled(here: Path) -> None:
    """A monitor that ended early, or one of two nodes, measured a part of the energy, which is not the run's."""
    monitored(here, 0, busy(90), busy(70))
    for values in ({"elapsed_s": 2}, {"elapsed_s": 10, "nodes": 1}):
        assert read_row(here, **values)["energy_source"] == "modelled"
    assert read_row(here, nodes=1)["energy_source"] == "nvml"
    assert (read_row(here, nodes=1)["gpu_mem_bytes"], read_row(here)["gpu_mem_bytes"]) == (1 << 30, None)


def test_the_energy_of_a_run_whose_gpus_stopped_telling_their_power_stays_modelled(here: Path) -> None:
    monitored(here, 0, busy(90), *(busy(90, watts=None) for _ in range(9)))
    assert read_row(here, nodes=1, elapsed_s=10)["energy_source"] == "modelled"


def test_the_memory_of_a_run_of_which_one_node_did_not_tell_it_is_unknown(here: Path) -> None:
    monitored(here, 0, busy(90))
    monitored(here, 1, Load(cpu_percent=50.0, gpu_percent=90.0))
    assert (read_row(here)["gpu_mem_bytes"], read_row(here)["energy_source"]) == (None, "modelled")


def test_a_measured_energy_and_that_of_several_attempts_stay(here: Path) -> None:
    monitored(here, 0, busy(90), busy(90))
    for values in ({"energy_source": "measured"}, {"attempts": 2}):
        assert read_row(here, nodes=1, **values)["energy_j"] == 10_000.0


def test_gpus_that_tell_no_power_still_tell_their_use(here: Path) -> None:
    monitored(here, 0, busy(80, watts=None))
    row = read_row(here)
    assert (row["gpu_utilization"], row["energy_source"]) == (0.8, "modelled")


def test_without_a_monitor_or_without_gpus_the_accounting_stays(here: Path) -> None:
    assert read_row(here, gpu_utilization=0.1, gpu_source="sacct")["gpu_source"] == "sacct"
    monitored(here, 0, Load(cpu_percent=90.0))
    assert read_gpu_usage(here) is None
    monitored(here, 0, busy(90))
    assert read_row(here, gpus=0)["gpu_utilization"] is None


def test_a_task_of_an_array_has_its_own_monitor_and_half_a_line_is_left_out(here: Path) -> None:
    (here / "3").mkdir()
    monitored(here / "3", 0, busy(60), busy(80))
    with (here / "3" / "monitor.jsonl").open("a") as file:
        file.write('{"kind": "sample", "time_s": 3.0, "gpu_per')
    assert read_row(here, job_id="7_3")["gpu_utilization"] == pytest.approx(0.7)
    assert read_row(here, job_id="7_4")["gpu_utilization"] is None


@pytest.mark.parametrize(
    "damage",
    [
        "\0\0\0\0",
        "[]",
        '{"kind": "sample", "time_s": 2.5, "gpu_percent": "all"}',
        '{"kind": "sample", "time_s": 2.5, "gpu_percent": 1e999, "gpu_power_w": 5}',
        '{"kind": "sample", "time_s": -1e300, "gpu_percent": 100, "gpu_power_w": 5}',
        '{"kind": "sample", "time_s": 2.5, "gpu_pow',
    ],
)
def test_damaged_lines_of_a_monitor_are_left_out(here: Path, damage: str) -> None:
    monitored(here, 0, busy(60), busy(80))
    expected = read_row(here)
    with (here / "monitor.jsonl").open("a") as file:
        file.write(damage + "\n")
    assert read_row(here) == expected


class FakeSbatch:
    """Estimates as sbatch does, on standard error: later for what asks for more."""

    def __init__(self, output: str = "sbatch: Job 9 to start at {} using 4 processors on nodes n[1-2]", code: int = 0):
        self.output, self.code = output, code
        self.queries: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        self.queries.append(argv)
        assert argv[:2] == ["sbatch", "--test-only"]
        return Result(self.code, "", self.output.format(2_000_000_000 - 7200 * ("--mem=4G" in argv)))


@pytest.fixture
def run_dir(here: Path) -> Path:
    """The run folder of a job that was submitted to a cluster."""
    made = plan(["true"], site=CLUSTER)
    folder.create(made, None)
    return made.run_dir


def test_advice_says_what_it_does_to_the_wait(run_dir: Path) -> None:
    sbatch = FakeSbatch()
    estimate = estimate_starts(run_dir, ["--mem=4G"], runner=sbatch)
    assert estimate is not None
    assert (estimate.as_requested, estimate.as_advised) == (2_000_000_000, 2_000_000_000 - 7200)
    assert sbatch.queries[1][2:] == ["--mem=4G", str(run_dir / "job.sh")]
    assert "instead of" in str(estimate)
    assert "either way" in str(estimate._replace(as_advised=estimate.as_requested))


@pytest.mark.parametrize(
    "sbatch", [FakeSbatch("allocation failure: Requested node configuration is not available", 1), FakeSbatch("", 0)]
)
def test_where_slurm_cannot_tell_nothing_is_said(run_dir: Path, sbatch: FakeSbatch) -> None:
    assert estimate_starts(run_dir, ["--mem=4G"], runner=sbatch) is None


def test_times_in_words_are_read_and_nothing_is_asked_without_advice(run_dir: Path) -> None:
    estimate = estimate_starts(
        run_dir, ["--mem=4G"], runner=FakeSbatch("Job 9 to start at 2033-05-18T03:33:20 using 4")
    )
    assert estimate is not None
    assert estimate.as_requested == estimate.as_advised
    sbatch = FakeSbatch()
    assert estimate_starts(run_dir, [], runner=sbatch) is None
    assert sbatch.queries == []
