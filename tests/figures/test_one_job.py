"""The figures of ``show``, ``ps`` and ``diff``, from the rows of squeue and sacct and what the program wrote."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import ok
from run_summaries import accounted, summary_of_steps, write_summary
from scripted_cluster import ScriptedCluster, read_duration, read_table

RATES = {
    "received": "network_received_bytes_per_s",
    "sent": "network_sent_bytes_per_s",
    "read": "read_bytes_per_s",
    "written": "written_bytes_per_s",
}


@pytest.fixture(autouse=True)
def program() -> None:
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")


def submitted() -> tuple[str, Path]:
    job = ok("submit", "--json", "-N", "2", "train.py").json
    return job["job_id"], Path(job["run_dir"])


def running(job_id: str, minutes: int) -> dict[str, str]:
    """What squeue says of a job, by the letters of its format."""
    return {
        "i": job_id, "j": "train", "T": "RUNNING", "r": "None", "P": "gpu", "N": "n[1-2]", "D": "2", "V": "0",
        "S": "N/A", "M": f"{minutes}:07", "o": "", "u": "anna", "a": "lab", "q": "normal", "Q": "1", "L": "1:00:00",
    }  # fmt: skip


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
    (folder / "attempts.jsonl").write_text(
        json.dumps({"job_id": job_id, "started": 1.8e9, "ended": 1.8e9 + 600, "nodes": "n1", "exit_code": 1,
                    "cause": "node", "steps": 700, "saved": 650, "decision": "requeued"}) + "\n", encoding="utf-8",
    )  # fmt: skip
    out = ok("show", job_id).out
    assert re.search(r"attempt 1: .* to .* on n1, node at step 700, 50 lost; requeued", out)
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
    cluster.queue([running(job_id, minutes)])
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


def test_the_memory_of_a_local_job_is_that_of_its_largest_process() -> None:
    Path("large.py").write_text(
        "import resource\nheld = bytearray(300 << 20)\n"
        "print('held', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n",
        encoding="utf-8",
    )
    job = ok("submit", "--site", "local", "--wait", "--json", "--ntasks-per-node", "2", "large.py").json
    (number, unit) = re.findall(r"peak memory of a process ([\d.]+)([MG])", ok("show", job["job_id"]).out)[0]
    (log,) = (Path(job["run_dir"]) / "logs").iterdir()
    held = max(int(text) for text in re.findall(r"held (\d+)", log.read_text(encoding="utf-8"))) * 1024
    assert float(number) * {"M": 1 << 20, "G": 1 << 30}[unit] == pytest.approx(held, rel=0.1)


def test_the_load_of_a_running_job_is_the_newest_sample_of_each_node(cluster: ScriptedCluster) -> None:
    job_id, folder = submitted()
    cluster.queue([running(job_id, 5)])
    chance, expected = np.random.default_rng(8), {}
    for name, host in (("monitor", "n1"), ("monitor-1", "n2")):
        head = {"kind": "monitor", "schema": "hpcjobs.monitor/1", "host": host, "interval_s": 1.0}
        lines: list[dict[str, Any]] = [head | {"started_at": time.time() - 30}]
        for second in range(1, 20):
            values = {key: float(chance.uniform(1, 99)) for key in ("cpu_percent", "gpu_percent", "gpu_temperature_c")}
            sizes = {key: float(chance.integers(1 << 28, 9 << 30)) for key in ("rss_bytes", "gpu_memory_bytes")}
            rates = {key: float(chance.integers(1 << 20, 1 << 28)) for key in RATES.values()}
            lines.append({"kind": "sample", "time_s": float(second), "gpu_power_w": 300.4} | values | sizes | rates)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        expected[host] = lines[-1]
    out = ok("show", job_id).out
    for host, newest in expected.items():
        (text, ago) = re.findall(rf"^  {host}: (.*)  \((\d+)s ago\)$", out, re.MULTILINE)[0]
        assert 11 <= int(ago) <= 20
        shown = dict(re.findall(r"([A-Za-z ]+?) ([\d.]+(?: ?[%WMGK°C/s]+))(?:, |$)", text))
        for name, key in (("CPU", "cpu_percent"), ("GPU", "gpu_percent"), ("GPU temperature", "gpu_temperature_c")):
            assert float(shown[name].split()[0]) == pytest.approx(newest[key], abs=0.51)
        assert shown["GPU power"] == "300 W"
        for name, key in {"memory": "rss_bytes", "GPU memory": "gpu_memory_bytes", **RATES}.items():
            number, unit = re.findall(r"([\d.]+)([KMG])", shown[name])[0]
            scale = 1024.0 ** (1 + "KMG".index(unit))
            assert float(number) * scale == pytest.approx(newest[key], abs=0.051 * scale), name


def test_the_tasks_of_an_array_are_one_line_of_their_counts_and_the_longest_time(cluster: ScriptedCluster) -> None:
    job_id = ok("submit", "--json", "--array", "0-5", "train.py").json["job_id"]
    minutes = (7, 31, 12)
    begins = [int(time.time()) - 60 * spent for spent in minutes]
    tasks = [
        running(f"{job_id}_{task}", spent) | {"D": "1", "N": "n1", "S": str(begin)}
        for task, (spent, begin) in enumerate(zip(minutes, begins, strict=True))
    ]
    waiting = running(f"{job_id}_[3-5]", 0) | {"T": "PENDING", "M": "0:00", "N": "", "r": "JobArrayTaskLimit"}
    cluster.queue([*tasks, waiting])
    (row,) = read_table(ok("ps").out, "JOB")
    assert sorted(row["STATE"].split(", ")) == ["3 PENDING", "3 RUNNING"]
    assert (row["NODES"], row["ELAPSED"]) == ("6 tasks", "31m07s")
    assert row["START"].endswith(time.strftime("%H:%M", time.localtime(min(begins)))) or row["START"] == time.strftime(
        "%T", time.localtime(min(begins))
    )
    assert len(read_table(ok("ps", "--tasks").out, "JOB")) == 4


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
