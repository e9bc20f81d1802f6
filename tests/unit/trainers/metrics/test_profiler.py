"""Traces of some steps, and snapshots of a GPU's memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.profiler import record_memory

from ..conftest import World, worlds_path

POINTS = ("--workload", "worlds:points", "--no-probe", "--log-every", "1")


def test_each_rank_writes_a_trace_of_the_steps_and_rank_0_lists_the_costliest_operators(world: World) -> None:
    ended = world(2, "ddp", *POINTS, "--steps", "4", "--profile", "1:3", env={"PYTHONPATH": worlds_path()})
    assert ended.codes == [0, 0]
    for rank in range(2):
        with gzip.open(ended.run_dir / "profile" / f"rank-{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("Optimizer.step#AdamW.step") == 2
    assert "aten::" in ended.out[0].partition("operators of rank 0 by their own time")[2]
    assert "operators of rank 0" not in ended.out[1]
    assert len(ended.losses()) == 4


def test_a_run_that_ends_before_stop_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    flags = [*POINTS, "--steps", "2", "--profile", "0:50", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", flags) == 0
    assert (tmp_path / "profile" / "rank-0.json.gz").exists()


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (("--profile", "3:3"), "STOP is not after START"),
        (("--profile", "3"), "'3' is not START:STOP"),
        (("--memory-snapshot", "--device", "cpu"), "is of a GPU's memory, and this run is on CPUs"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    flags: tuple[str, ...], arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainers.run("ddp", ["--steps", "1", *flags, "--run-dir", str(tmp_path)]) == 2
    assert arguments in capsys.readouterr().err


def test_a_snapshot_is_written_also_where_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own recorder is replaced: it needs a GPU."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: calls.append("record"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    group = RankGroup(DistEnv(1, 1, 2, 2, 0, "here", 1, "test"), ("a", "a"), torch.device("cuda", 1), "nccl")
    with pytest.raises(torch.OutOfMemoryError), record_memory(group, tmp_path, on=True):
        raise torch.OutOfMemoryError
    assert (tmp_path / "memory" / "rank-1.pickle").read_text() == "snapshot"
    assert calls == ["record", "record"]
