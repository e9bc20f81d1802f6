"""Metrics in TensorBoard, Weights & Biases and MLflow, read back by what each of them reads with."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

POINTS = ["--workload", "worlds:scored", "--no-probe", "--log-every", "1", "--device", "cpu"]
FOREIGN = (
    "SLURM",
    "PMI",
    "OMPI",
    "HOROVOD",
    "HPCJOBS",
    "TORCHELASTIC",
    "MASTER_",
    "RANK",
    "WORLD_",
    "LOCAL_",
    "WANDB",
    "MLFLOW",
)
REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import os, signal
import hpcjobs.runtime

run = hpcjobs.runtime.start(total_steps=6, log_to=["tensorboard", "wandb", "mlflow"])
state = run.load() or {"x": 1.0}
for step in range(run.step + 1, 7):
    state = {"x": state["x"] * 0.5}
    run.log(step, loss=state["x"], tokens=32, norm=2.5)
    if step == 3 and run.step == 0:
        run.save(step, state)
    if step == 5 and run.step == 0:
        run.flush()
        os.kill(os.getpid(), signal.SIGUSR1)
    if run.should_stop():
        run.leave()
run.finish()
"""

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytest.importorskip("mlflow")

Curve = list[tuple[int, float]]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Without proxies and keys: a node without a network."""
    hidden = (*FOREIGN, "HTTP", "http", "ALL_PROXY", "all_proxy")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = f"{REPOSITORY}:{REPOSITORY / 'tests/unit/trainers'}"
    return {**rest, "OMP_NUM_THREADS": "1", "HOME": str(folder), "PYTHONPATH": path, **more}


def train(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcjobs.trainers.ddp", *POINTS, *flags, "--run-dir", str(folder / "run")]
    return subprocess.run(
        command, cwd=folder, env=environment(folder, **env), capture_output=True, text=True, timeout=400
    )


def read_metrics(run_dir: Path) -> dict[str, Curve]:
    """The curves of metrics.jsonl, by the names that trackers have."""
    curves: dict[str, Curve] = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        group = {"step": "train", "evaluation": "held_out"}.get(line["kind"])
        if group is not None:
            curves.setdefault(f"{group}/loss", []).append((line["step"], line["loss"]))
    return curves


def read_tensorboard(run_dir: Path) -> dict[str, Curve]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Curve], list[Any]]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir / "mlruns").as_uri())
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (run_id,) = {one.info.run_id for one in runs}
    curves: dict[str, Curve] = {}
    for name in runs[0].data.metrics:
        newest = {one.step: one.value for one in client.get_metric_history(run_id, name)}
        curves[name] = sorted(newest.items())
    return curves, runs


def read_records(path: Path) -> Iterator[Any]:
    """wandb's protobuf records of an offline run: blocks of 32 KiB with LevelDB's framing, after 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_wandb(run_dir: Path) -> tuple[dict[str, Curve], set[str]]:
    """The curves of all offline folders, a later one's values in place of an earlier one's; the ids of the runs."""
    newest: dict[str, dict[int, float]] = {}
    ids = set()
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for name, value in items.items():
                    newest.setdefault(name, {})[items["_step"]] = value
    return {name: sorted(values.items()) for name, values in newest.items()}, ids


def test_a_trainers_curves_come_back_from_all_three_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(tmp_path, "--steps", "16", "--log-to", "tensorboard", "wandb", "mlflow")
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr
    run_dir = tmp_path / "run"
    expected = read_metrics(run_dir)
    assert len(expected["train/loss"]) == 16
    assert [step for step, _ in expected["held_out/loss"]] == [8, 16]
    board, (weights, ids) = read_tensorboard(run_dir), read_wandb(run_dir)
    flow, (run,) = read_mlflow(run_dir, monkeypatch)
    assert len(ids) == 1
    assert (run.info.status, run.data.params["steps"], run.data.params["workload"]) == (
        "FINISHED",
        "16",
        "worlds:scored",
    )
    for name, curve in expected.items():
        assert board[name] == [(step, pytest.approx(value)) for step, value in curve]
        assert weights[name] == curve
        assert flow[name] == curve
    assert board.keys() >= {"train/lr", "train/throughput", "train/step_time_s", "epoch"}
    assert done.stdout.count("metrics also go to") == 3


def test_a_run_that_was_stopped_goes_on_in_the_same_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    codes = [
        subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment(tmp_path), timeout=300).returncode
        for _ in range(2)
    ]
    assert codes == [85, 0]
    run_dir = tmp_path / "runs" / "train"
    expected = read_metrics(run_dir)["train/loss"]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    weights, ids = read_wandb(run_dir)
    flow, runs = read_mlflow(run_dir, monkeypatch)
    assert len(ids) == len(runs) == 1
    assert read_tensorboard(run_dir)["train/loss"] == [(step, pytest.approx(value)) for step, value in expected]
    assert weights["train/loss"] == expected
    assert flow["train/loss"] == expected
    assert flow["train/norm"] == [(step, 2.5) for step in range(1, 7)]


def test_a_server_that_fails_costs_its_copy_and_a_warning_and_not_the_run(tmp_path: Path) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        uri = f"http://127.0.0.1:{server.server_port}"
        done = train(tmp_path, "--steps", "2", "--log-to", "mlflow", "tensorboard", MLFLOW_TRACKING_URI=uri)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: no more metrics go to mlflow:") == 1
    assert len(read_tensorboard(tmp_path / "run")["train/loss"]) == 2


def test_a_server_that_does_not_answer_is_replaced_by_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(tmp_path, "--steps", "2", "--log-to", "mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert len(read_mlflow(tmp_path / "run", monkeypatch)[0]["train/loss"]) == 2


def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from hpcjobs.runtime.exits import UsageError
    from hpcjobs.runtime.step_log import require_trackers

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"metrics for wandb need its package. Hint: pip install 'hpcjobs\[wandb\]'"):
        require_trackers(["wandb"])
    with pytest.raises(UsageError, match="tensorboard, wandb, mlflow"):
        require_trackers(["comet"])
