"""What recording costs, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.record.summary import Quantiles, RunSummary
from hpcjobs.runtime import watchdog
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.watchdog import Watchdog
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data import EpochOrder
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.launch import Call
from hpcjobs.trainers.loop import make_watchdog, set_numerics
from hpcjobs.trainers.metrics import Meter, Recorder
from hpcjobs.trainers.optimization import grow_synthetic, plan_training
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.lm import lm

from .. import worlds
from ..conftest import World, worlds_path

A_MILLION = 10**6


def alone() -> RankGroup:
    return RankGroup(DistEnv.from_environ({}), ("here",), torch.device("cpu"), "gloo")


def test_watching_a_run_of_a_million_steps_ranks_no_more_times_than_one_of_a_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[int] = []
    quantiles_of = Quantiles.of

    def counted(values: Sequence[float]) -> Quantiles | None:
        ranked.append(len(values))
        return quantiles_of(values)

    monkeypatch.setattr(watchdog.Quantiles, "of", counted)
    meter = Meter(torch.device("cpu"))
    meter.step_s.extend([0.01] * A_MILLION)
    guard = Watchdog(alone(), tmp_path, lambda: meter.recent_steps, after_s=None, on=False)
    guard.update_limit()
    looks = [guard.limit_s for _ in range(100)]
    assert ranked == [1000], "one ranking of the newest steps, and none for a look"
    assert set(looks) == {watchdog.LEAST_S}


def test_the_limit_of_the_watchdog_follows_the_newest_steps(tmp_path: Path) -> None:
    meter = Meter(torch.device("cpu"))
    guard = Watchdog(alone(), tmp_path, lambda: meter.recent_steps, after_s=None, on=False)
    assert guard.limit_s == watchdog.FIRST_S
    meter.step_s.extend([0.01] * 3000)
    guard.update_limit()
    assert guard.limit_s == watchdog.LEAST_S
    meter.step_s.extend([60.0] * 1000)
    guard.update_limit()
    assert guard.limit_s == watchdog.FACTOR * 60.0


def quiet_run(tmp_path: Path, trainer: str, *flags: str) -> RunSummary:
    assert trainers.run(trainer, [*flags, "--run-dir", str(tmp_path)]) == 0
    return RunSummary.read(tmp_path)


def test_throughput_counts_the_samples_that_were_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ("--workload", "lm", "--sequence-length", "16", "--train-samples", "16", "--steps", "4", "--log-every", "1")
    summary = quiet_run(tmp_path, "ddp", *lm, "--batch-size", "256")
    assert summary.samples == 4 * 16
    assert summary.throughput is not None
    assert summary.step_time_s is not None
    tokens_per_step = (
        summary.throughput.value * summary.step_time_s.median
    )  # in a mean step, which a busy machine varies
    assert 0 < tokens_per_step < 4 * 16 * 16, "not those of a full batch, which are 16 times as many"
    assert "warning: a rank's share of an epoch is 16 of 16 samples, less than the 256" in capsys.readouterr().out


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("count", "world"), [(64, 4), (61, 4), (3, 4), (50, 3)])
def test_samples_of_any_number_of_steps_are_those_that_the_ranks_take(count: int, world: int, fill: bool) -> None:
    workload = replace(worlds.points(Config()), train=worlds.Points(count))
    plan = plan_training(Config(batch_size=5, epochs=2), workload, world, fill=fill)
    taken = [0] * plan.total_steps
    for rank in range(world):
        for epoch in range(2):
            batches = EpochOrder(count, rank, world, plan.samples_per_step, 0, epoch, fill=fill)
            for step, draw in enumerate(batches, epoch * plan.steps_per_epoch):
                taken[step] += len(draw.samples)
    assert [plan.samples_before(step + 1) - plan.samples_before(step) for step in range(plan.total_steps)] == taken


@pytest.mark.parametrize(("count", "world", "batch_size"), [(100, 1, 10), (100, 1, 70), (100, 2, 20), (101, 2, 30)])
def test_a_checkpoint_at_the_end_of_an_epoch_is_the_start_of_the_next_for_any_world(
    count: int, world: int, batch_size: int
) -> None:
    """The last batch of an epoch is smaller: as many full batches of another size are more samples than there are."""
    workload = replace(worlds.points(Config()), train=worlds.Points(count))
    before = plan_training(Config(batch_size=10, epochs=3), workload, 3)
    ended = CheckpointMeta(before.steps_per_epoch, 0, before.steps_per_epoch * before.global_batch_size, 3, 0, None)
    plan = plan_training(Config(batch_size=batch_size, epochs=3), workload, world)
    assert plan.resume_at(0, ended.epoch_samples, done=ended.step).locate(ended.step) == (1, 0)
    earlier = replace(ended, step=ended.step - 1, epoch_samples=(ended.step - 1) * before.global_batch_size)
    left = math.ceil(math.ceil((count - earlier.epoch_samples) / world) / batch_size)
    resumed = plan.resume_at(0, earlier.epoch_samples, done=earlier.step)
    assert resumed.locate(earlier.step) == (0, plan.steps_per_epoch - left)
    assert resumed.total_steps == earlier.step + left + 2 * plan.steps_per_epoch


def test_synthetic_data_grows_with_the_world_so_that_every_batch_is_full() -> None:
    config = Config(workload="lm", batch_size=256)
    workload = grow_synthetic(config, load_workload(config), 64)
    plan = plan_training(config, workload, 64)
    assert plan.steps_per_epoch == 32
    assert plan.samples_before(plan.steps_per_epoch) == 32 * 64 * 256
    given = replace(config, train_samples=16)
    assert len(grow_synthetic(given, load_workload(given), 64).train) == 16


def test_a_slow_rank_is_seen_in_the_times_of_all_ranks(world: World) -> None:
    flags = ("--workload", "worlds:lopsided", "--steps", "12", "--log-every", "4")
    ended = world(2, "ddp", *flags, env={"PYTHONPATH": worlds_path()})
    assert ended.codes == [0, 0], ended.err
    ranks = ended.summary.by_rank
    assert ranks is not None
    assert ranks.data_wait_s is not None
    assert ranks.compute_s is not None
    assert ranks.data_wait_s[1] > max(0.1, ranks.data_wait_s[0])
    assert ranks.compute_s[1] > max(0.1, ranks.compute_s[0])
    assert ended.summary.imbalance is not None
    assert 0.2 < ended.summary.imbalance < 1.0, "200 ms and next to nothing"
    for line in ended.lines("step"):
        assert line["data_wait_max_rank"] == 1
        assert line["data_wait_max_s"] >= max(0.1, line["data_wait_s"])  # type: ignore[type-var]


@pytest.mark.parametrize(("config", "tf32"), [(Config(), False), (Config(tf32=True), True)])
def test_one_switch_sets_tf32_for_matrices_and_convolutions(config: Config, tf32: bool) -> None:
    try:
        set_numerics(config, replace(worlds.points(config), convolutions=True))
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cudnn.benchmark
        set_numerics(config, worlds.points(config))
        assert not torch.backends.cudnn.benchmark
    finally:
        set_numerics(Config(), worlds.points(config))


def test_a_text_is_learnt_by_a_head_of_256_bytes_in_every_preset(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("सगरमाथा " * 1000, encoding="utf-8")
    config = Config(preset="gpt2", text=(str(tmp_path / "text"),))
    with torch.device("meta"):
        model = load_workload(replace(config, workload="lm")).build_model()
    assert model.head.out_features == 256
    assert load_workload(replace(config, workload="lm", text=())).flops_per_sample > 1.2 * lm(config).flops_per_sample


@pytest.mark.parametrize(("ranks", "watches"), [(1, False), (2, True)])
def test_ranks_that_wait_for_each_other_are_watched_without_retries(
    ranks: int, watches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda thread: None)
    env = replace(DistEnv.from_environ({}), world_size=ranks)
    call = Call("ddp", Config(), None, env)
    group = replace(alone(), env=env)
    guard = make_watchdog(call, group, tmp_path, cast(Recorder, SimpleNamespace(meter=Meter(torch.device("cpu")))))
    assert (guard._thread is not None) == watches
