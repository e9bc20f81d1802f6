"""A script of one's own whose ranks meet over torch.distributed: they stop together, and the state holds tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from free_ports import free_port

from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime import checkpoints

from ..conftest import start_rank

SCRIPT = """
import os, signal, time
import torch
import torch.distributed as dist
import hpcjobs.runtime

BEFORE = "torch.distributed meets before the run is begun" if "MEETS_FIRST" in os.environ else ""
if BEFORE:
    dist.init_process_group("gloo")
def largest(mine):
    flag = torch.tensor(mine)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag)
run = hpcjobs.runtime.start(total_steps=60, reduce=largest if "REDUCE" in os.environ else None)
if not BEFORE:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = run.load()
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for step in range(run.step + 1, 61):
    generator = torch.Generator().manual_seed(1000 * step + run.rank)
    points = torch.randn(8, 4, generator=generator)
    loss = ((model(points) - points.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", "0")))
    run.log(step, loss=loss, samples=8)
    if os.environ.get("ASKED_AT") == f"{run.rank}:{step}":
        os.kill(os.getpid(), signal.SIGTERM)
    if run.should_stop() or step % 20 == 0:
        run.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if run.stopping:
        run.leave()
run.finish(loss=loss)
dist.destroy_process_group()
"""


def run_world(folder: Path, name: str, **env: str) -> list[int | None]:
    """Exit codes of two ranks with the run folder `name`."""
    run_dir = folder / name
    (run_dir / "control").mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    settings = {
        "HPCJOBS_RUN_DIR": str(run_dir),
        "HPCJOBS_CONTROL_DIR": str(run_dir / "control"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **env,
    }
    ranks = [start_rank(rank, 2, ["train"], settings, folder) for rank in range(2)]
    try:
        output = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(err.strip() for _, err in output), output
    return [rank.returncode for rank in ranks]


def read_losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("way", ["", "MEETS_FIRST", "REDUCE"])
def test_ranks_that_have_met_stop_together_and_the_next_start_has_the_losses_of_a_run_left_alone(
    tmp_path: Path, way: str
) -> None:
    more = {way: "yes"} if way else {}
    assert run_world(tmp_path, "alone", **more) == [0, 0]
    assert run_world(tmp_path, "asked", **more, ASKED_AT="1:21", PAUSE="0.06") == [85, 85]
    step = int((tmp_path / "asked" / "control" / "requeue").read_text())
    assert 21 <= step < 60
    assert int((tmp_path / "asked" / "control" / "steps").read_text()) == step, "nothing is lost"
    place = tmp_path / "asked" / "checkpoints" / f"step-{step:08d}"
    assert checkpoints.damage(place) is None
    assert (place / "state.pt").exists()
    assert not list((tmp_path / "asked" / "control").glob(".stop-*")), "no file was needed to agree"
    assert run_world(tmp_path, "asked", **more) == [0, 0]
    assert RunSummary.read(tmp_path / "asked").resumed_from_step == step
    assert read_losses(tmp_path / "asked") == read_losses(tmp_path / "alone")
