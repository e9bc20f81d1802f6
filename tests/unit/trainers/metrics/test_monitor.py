"""What the machine did, beside what the training did."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hpcjobs.record.monitor import Load
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.metrics import Monitor, summed_up

from ..conftest import World, worlds_path

FLAGS = ("ddp", "--workload", "worlds:points", "--steps", "20", "--log-every", "1")


def test_one_rank_of_the_node_samples_and_the_summary_has_means_and_peaks(world: World) -> None:
    watched = world(2, *FLAGS, "--monitor", env={"PYTHONPATH": worlds_path()})
    assert (watched.codes, watched.complaints) == ([0, 0], [])
    first, *samples, end = map(json.loads, (watched.run_dir / "monitor.jsonl").read_text(encoding="utf-8").splitlines())
    assert (first["kind"], first["schema"], first["interval_s"]) == ("monitor", "hpcjobs.monitor/1", 1.0)
    assert end == {"kind": "end"}
    assert [(sample["ranks"], sample["ended_ranks"]) for sample in samples] == [(2, [])] * len(samples)
    assert [path.name for path in watched.run_dir.glob("monitor*")] == ["monitor.jsonl"]
    summary = watched.summary.monitor
    assert summary is not None
    assert summary.samples == len(samples)
    assert summary.peak.rss_bytes == max(sample["rss_bytes"] for sample in samples)
    assert summary.peak.rss_bytes > 2**27  # of both ranks
    assert summary.mean.gpu_percent is None
    assert watched.out[0].count("monitor: no GPU is watched: the ranks use none") == 1
    assert "no GPU is watched" not in watched.out[1]


def test_a_run_that_is_not_watched_says_so_by_null(world: World) -> None:
    plain = world(1, *FLAGS, env={"PYTHONPATH": worlds_path()})
    assert plain.summary.monitor is None
    assert not list(plain.run_dir.glob("monitor*"))


def test_gpus_that_nvml_does_not_know_are_not_taken_for_idle_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.hip", "6.2")
    group = SimpleNamespace(device=torch.device("cuda"), hosts=["n1"], rank=0, log=lambda text: None)
    sampler = Monitor(cast(RankGroup, group), tmp_path, on=True)._make_sampler({0: (os.getpid(), None)})
    values = sampler.sample()
    assert (values["busy_percent"], values["idle_s"]) == (None, None)
    assert values["cpu_percent"] is not None


def test_gpus_decide_what_is_idle_where_there_are_any() -> None:
    result = summed_up([Load(cpu_percent=90.0, gpu_percent=use) for use in (0.0, 4.0, 50.0, 100.0)])
    assert result is not None
    assert result.idle_share == 0.5
    assert (result.mean.gpu_percent, result.peak.gpu_percent) == (pytest.approx(38.5), 100.0)
    assert result.mean.gpu_power_w is None
    assert summed_up([]) is None
