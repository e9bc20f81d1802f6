"""The throughput and the times of summary.json, from a stopwatch in the program and from the lines of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commandline import ok

SCRIPT = """
import json, random, time
import hpcjobs.runtime

random.seed(4)
run, state, durations = hpcjobs.runtime.start(total_steps=60), bytes(8 << 20), []
run.log(0, loss=1.0)
for step in range(1, 61):
    began = time.perf_counter()
    time.sleep(random.uniform(0.005, 0.03))
    durations.append(time.perf_counter() - began)
    run.log(step, loss=1 / step, samples=24)
    if step % 10 == 0:
        with run.exclude_time():
            time.sleep(0.3)  # an evaluation
        run.save(step, {"weights": state})
run.finish(accuracy=sum(durations))
print("stopwatch", json.dumps(durations))
"""


def run_of(*arguments: str) -> tuple[Path, dict[str, Any]]:
    job = ok("submit", "--site", "local", "--wait", "--json", *arguments).json
    folder = Path(job["run_dir"])
    return folder, json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_the_throughput_of_a_script_is_its_work_over_the_stopwatch_of_its_steps() -> None:
    Path("timed.py").write_text(SCRIPT, encoding="utf-8")
    folder, left = run_of("timed.py")
    (log,) = (folder / "logs").iterdir()
    text = log.read_text(encoding="utf-8").partition("stopwatch ")[2]
    every = json.loads(text.partition("\n")[0])
    took = np.array(every)[1:]  # the first two lines: of step 0 and of step 1
    assert left["throughput"]["unit"] == "samples/s"
    assert left["throughput"]["value"] == pytest.approx(24 * len(took) / took.sum(), rel=0.03)
    assert left["step_time_s"]["count"] == len(took)
    assert left["step_time_s"]["median"] == pytest.approx(np.median(took), abs=2e-3)
    assert left["step_time_s"]["p95"] == pytest.approx(np.quantile(took, 0.95, method="inverted_cdf"), abs=2e-3)
    assert left["results"] == {"accuracy": pytest.approx(sum(every))}
    assert left["elapsed_s"] > took.sum() + 6 * 0.3  # evaluations are part of the run, but of no step


def test_the_throughput_of_a_trainer_is_its_work_over_the_time_of_its_steps() -> None:
    pytest.importorskip("torch")
    flags = ("--steps", "40", "--log-every", "1", "--checkpoint-every", "8", "--eval-every", "10")
    folder, left = run_of("hpcjobs.trainers.ddp", *flags)
    lines = pd.read_json(folder / "metrics.jsonl", lines=True)
    steps = lines[lines["kind"] == "step"]
    assert steps["step"].tolist() == list(range(1, 41))
    counted = steps.iloc[2:]
    work = (counted["throughput"] * counted["step_time_s"]).sum()
    took = counted["step_time_s"].sum()
    assert left["throughput"]["value"] == pytest.approx(work / took, rel=1e-3)
    assert left["throughput"]["unit"] == counted["unit"].iloc[0]
    assert left["step_time_s"]["count"] == len(counted)
    for name, share in (("median", 0.5), ("p95", 0.95)):
        expected = np.quantile(counted["step_time_s"], share, method="inverted_cdf")
        assert left["step_time_s"][name] == pytest.approx(expected, rel=1e-3)
    stalls = lines.loc[lines["kind"] == "checkpoint", "stall_s"]
    assert left["checkpoint_stall_s"]["count"] == len(stalls)
    assert left["checkpoint_stall_s"]["total"] == pytest.approx(stalls.sum(), rel=0.01)
    assert left["loss"] == pytest.approx(steps["loss"].iloc[-1], rel=1e-6)
    beside = lines.loc[lines["kind"] == "end", "elapsed_s"].iloc[0] - steps["step_time_s"].sum()
    assert beside > 0  # evaluations and checkpoints
    assert left["elapsed_s"] >= took + beside


def test_an_epoch_is_timed_with_its_evaluation_and_its_waits_for_data(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flags = ("--epochs", "3", "--log-every", "1", "--batch-size", "250")
    folder, left = run_of("--ntasks-per-node", "1", "hpcjobs.trainers.ddp", *flags)
    lines = pd.read_json(folder / "metrics.jsonl", lines=True)
    epochs = lines[lines["kind"] == "epoch"]
    steps, evaluations = lines[lines["kind"] == "step"], lines[lines["kind"] == "evaluation"]
    assert epochs["epoch"].to_list() == [0, 1, 2]
    assert epochs["step"].to_list() == [16, 32, 48]  # 4000 digits
    between = np.diff(epochs["time_s"])
    assert epochs["epoch_s"].iloc[1:].to_numpy() == pytest.approx(between, rel=0.05, abs=0.01)
    waits = steps.groupby("epoch")["data_wait_s"].sum().to_numpy()
    assert (epochs["data_wait_share"] * epochs["epoch_s"]).to_numpy() == pytest.approx(waits, rel=0.02, abs=1e-3)
    last_steps = steps[steps["step"].isin(evaluations["step"])]["time_s"].to_numpy()
    evaluated = evaluations["time_s"].to_numpy() - last_steps
    assert (epochs["evaluation_share"] * epochs["epoch_s"]).to_numpy() == pytest.approx(evaluated, rel=0.1, abs=0.02)
    assert left["epoch_s"]["count"] == 3
    assert left["epoch_s"]["median"] == pytest.approx(np.median(epochs["epoch_s"]))
    for share in ("evaluation_share", "data_wait_share"):
        assert left[share] == pytest.approx((epochs[share] * epochs["epoch_s"]).sum() / epochs["epoch_s"].sum())


def test_the_figures_of_two_ranks_are_those_of_their_lines_and_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flags = ("--steps", "30", "--log-every", "1", "--eval-every", "10", "--probe-every", "10", "--monitor")
    folder, left = run_of("--ntasks-per-node", "2", "hpcjobs.trainers.ddp", *flags)
    lines = pd.read_json(folder / "metrics.jsonl", lines=True)
    steps = lines[lines["kind"] == "step"]
    counted = steps.iloc[2:]
    assert left["samples"] == len(steps) * left["global_batch_size"] == len(steps) * 2 * left["batch_size_per_rank"]
    assert left["epochs"] == pytest.approx(left["samples"] / 4000)  # digits that are shipped for training
    waits = np.quantile(counted["data_wait_s"], 0.5, method="inverted_cdf")
    assert left["data_wait_s"]["median"] == pytest.approx(waits, rel=1e-3)
    own = np.add(left["by_rank"]["compute_s"], left["by_rank"]["data_wait_s"])
    assert left["imbalance"] == pytest.approx(own.max() / own.mean() - 1)
    first, second, hidden = 16, 32, 128  # channels of the two convolutions of 5 x 5, width of the hidden layer
    weights = 26 * first + 2 * first + 25 * first * second + 3 * second + (49 * second + 3) * hidden + 10 * (hidden + 1)
    assert left["parameters"] == weights
    assert left["bytes_moved_per_step"] == 4 * weights  # a gradient of fp32 for each
    assert left["collectives_per_step"] == 1  # they fit into one bucket
    assert left["peak_flops_per_s"] is left["mfu"] is None  # nobody states the peak of a CPU
    products = 28**2 * first * 25 + 14**2 * second * first * 25 + 49 * second * hidden + 10 * hidden
    assert left["flops_per_s"] == pytest.approx(left["throughput"]["value"] * 6 * products)
    evaluation = lines[lines["kind"] == "evaluation"].iloc[-1]
    assert left["evaluation"]["accuracy"] == pytest.approx(evaluation["accuracy"])
    assert left["evaluation"]["loss"] == pytest.approx(evaluation["loss"])
    samples = pd.read_json(folder / "monitor.jsonl", lines=True).query("kind == 'sample'")
    for key in ("cpu_percent", "rss_bytes", "network_sent_bytes_per_s", "written_bytes_per_s"):
        assert left["monitor"]["mean"][key] == pytest.approx(samples[key].mean())
        assert left["monitor"]["peak"][key] == pytest.approx(samples[key].max())
    assert left["monitor"]["samples"] == len(samples)
    assert left["monitor"]["idle_share"] == pytest.approx((samples["cpu_percent"] < 5).mean())
    per_rank = samples["rss_bytes"].max() / 2  # pages that the ranks share count once, in a rank's peak each time
    assert left["memory_peak_bytes"] / 2 < per_rank < left["memory_peak_bytes"] * 1.1
    # A difference of two measured times: near 0 on a loaded machine, also below it.
    assert abs(left["exposed_communication_s"]["median"]) < left["elapsed_s"]
