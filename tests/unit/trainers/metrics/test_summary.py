"""summary.json and metrics.jsonl: what reports read."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.summary import Evaluation, Quantiles, RunSummary, Throughput


def example() -> RunSummary:
    return RunSummary(
        trainer="ddp",
        strategy="ddp",
        workload="mnist",
        status="completed",
        exit_code=0,
        world_size=2,
        hosts=("सगरमाथा", "b"),
        throughput=Throughput(10.0, "images/s"),
        step_time_s=Quantiles(0.1, 0.2, 9),
        evaluation=Evaluation(0.5, 0.9, 1000),
    )


def test_a_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    example().write(tmp_path)
    assert RunSummary.read(tmp_path) == example()


def test_a_summary_names_its_schema_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    example().write(folder)
    assert [path.name for path in folder.iterdir()] == ["summary.json"]
    assert json.loads((folder / "summary.json").read_text())["schema"] == "hpcjobs.summary/1"


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    path = example().write(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert RunSummary.read(tmp_path) == example()


def test_quantiles_are_of_the_values_themselves() -> None:
    assert Quantiles.of([float(n) for n in range(101)]) == Quantiles(50.0, 95.0, 101, 5050.0)
    for n in (1, 2, 3, 4, 10, 11, 100):  # as numpy's inverted_cdf has them
        ranked = np.arange(n, dtype=float)
        expected = np.quantile(ranked, [0.5, 0.95], method="inverted_cdf")
        quantiles = Quantiles.of(ranked.tolist())
        assert quantiles is not None
        assert [quantiles.median, quantiles.p95] == expected.tolist()
    assert Quantiles.of([]) is None


def test_metrics_of_steps_after_a_checkpoint_are_cut_off_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.write("step", step=1)
        position = log.tell()
        log.write("step", step=2)
    with closing(MetricsLog(path, keep_bytes=position)) as log:
        log.write("step", step=2, again=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "again": True},
    ]


@pytest.mark.parametrize("lost", [1, 20, 10_000])
def test_a_metrics_file_that_a_crash_cut_short_goes_on_behind_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        for step in (1, 2, 3):
            log.write("step", step=step)
        position = log.tell()
    os.truncate(path, max(0, position - lost))
    with closing(MetricsLog(path, keep_bytes=position)) as log:
        log.write("step", step=4)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == {1: [1, 2, 4], 20: [1, 2, 4], 10_000: [4]}[lost]
    assert f"{position} bytes" in capsys.readouterr().err
