"""The figures of ``show``, ``ps`` and ``diff``, from the rows of squeue and sacct and what the program wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import ok
from run_summaries import accounted, summary_of_steps, write_summary
from scripted_cluster import ScriptedCluster, read_duration, read_table


@pytest.fixture(autouse=True)
def program() -> None:
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")


def submitted() -> tuple[str, Path]:
    job = ok("submit", "--json", "-N", "2", "train.py").json
    return job["job_id"], Path(job["run_dir"])


def numbers_of(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            numbers |= numbers_of(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            numbers[prefix + key] = float(value)
    return numbers


@pytest.mark.parametrize("seed", range(3))
def test_the_results_and_the_time_of_a_job_are_those_of_its_summary_and_of_sacct(
    cluster: ScriptedCluster, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    job_id, folder = submitted()
    lasted = int(chance.integers(61, 200_000))
    cluster.account([accounted(job_id, nodes=2, lasted=lasted)])
    left = summary_of_steps(chance, step_s=0.2, ranks=2)
    write_summary(folder, left)
    out = ok("show", job_id).out
    (took,) = re.findall(rf"{job_id}: COMPLETED, on n\[1-2\], for (\S+), exit code 0", out)
    seconds, unit = read_duration(took)
    assert seconds <= lasted < seconds + unit
    printed = dict(re.findall(r"^  ([a-z_0-9.]+): ([-0-9.,e]+)$", out.partition("results:")[2], re.MULTILINE))
    expected = numbers_of(left)
    assert {"throughput.value", "step_time_s.median", "loss"} <= printed.keys() <= expected.keys()
    for name, text in printed.items():
        assert float(text.replace(",", "")) == pytest.approx(expected[name], rel=0.005, abs=1e-9), name


@pytest.mark.parametrize("seed", range(3))
def test_the_progress_of_a_running_job_is_its_newest_line_of_metrics(cluster: ScriptedCluster, seed: int) -> None:
    chance = np.random.default_rng(seed)
    job_id, folder = submitted()
    minutes = int(chance.integers(1, 59))
    cluster.queue([
        {"i": job_id, "j": "train", "T": "RUNNING", "r": "None", "P": "gpu", "N": "n[1-2]", "D": "2", "V": "0",
         "S": "N/A", "M": f"{minutes}:07", "o": "", "u": "anna", "a": "lab", "q": "normal", "Q": "1", "L": "1:00:00"}
    ])  # fmt: skip
    lines: list[dict[str, Any]] = [{"kind": "run", "schema": "hpcjobs.metrics/1", "total_steps": 4000}]
    lines += [
        {"kind": "step", "time_s": 0.1 * step, "step": step, "epoch": step // 500, "step_time_s": 0.1,
         "loss": float(chance.uniform(0.1, 9)), "throughput": float(chance.uniform(10, 90_000)), "unit": "tokens/s"}
        for step in range(50, int(chance.integers(200, 3000)), 50)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    newest = lines[-1]
    pattern = r"progress: step (\d+)(?:/\d+)?, epoch (\d+), loss (\S+), (\S+) tokens/s"
    (step, epoch, loss, rate) = re.findall(pattern, ok("show", job_id).out)[0]
    assert (int(step), int(epoch)) == (newest["step"], newest["epoch"])
    assert float(loss) == pytest.approx(newest["loss"], rel=0.005)
    assert float(rate.replace(",", "")) == pytest.approx(newest["throughput"], rel=0.005)
    (row,) = read_table(ok("ps").out, "JOB")
    assert (row["ELAPSED"], row["NODES"]) == (f"{minutes}m07s", "n[1-2]")
    assert row["PROGRESS"].split("/")[0] == step
    left, unit = read_duration(row["PROGRESS"].partition(", ")[2].removesuffix(" left"))
    assert left <= 0.1 * (4000 - newest["step"]) + 0.5 < left + unit + 1
    assert ok("ps", "--json").json[0]["record"]["elapsed_s"] == 60 * minutes + 7


def test_the_results_that_two_jobs_differ_in_are_those_of_their_summaries(cluster: ScriptedCluster) -> None:
    chance = np.random.default_rng(5)
    jobs = [submitted() for _ in range(2)]
    cluster.account([accounted(job_id, nodes=2) for job_id, _ in jobs])
    left = [summary_of_steps(chance, step_s=step_s, ranks=2) for step_s in (0.2, 0.1)]
    for (_, folder), values in zip(jobs, left, strict=True):
        write_summary(folder, values)
    out = ok("diff", jobs[0][0], jobs[1][0]).out.partition("results:")[2]
    printed = {name: (float(a), float(b)) for name, a, b in re.findall(r"  (\S+): ([-0-9.e]+) -> ([-0-9.e]+)", out)}
    first, second = map(numbers_of, left)
    changed = {name: (first[name], second[name]) for name in first if first[name] != second[name]}
    assert {"loss", "throughput.value", "step_time_s.median"} <= printed.keys()
    for name, values in printed.items():
        assert values == pytest.approx(changed[name]), name
