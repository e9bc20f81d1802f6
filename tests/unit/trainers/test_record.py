"""What recording costs, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.summary import Quantiles
from hpcjobs.trainers.core import watchdog
from hpcjobs.trainers.core.group import Group
from hpcjobs.trainers.core.meter import Meter
from hpcjobs.trainers.core.watchdog import Watchdog

A_MILLION = 10**6


def alone() -> Group:
    return Group(DistEnv.from_environ({}), ("here",), torch.device("cpu"), "gloo")


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
    guard = Watchdog(alone(), tmp_path, meter, after_s=None, on=False)
    guard.update_limit()
    looks = [guard.limit_s for _ in range(100)]
    assert ranked == [1000], "one ranking of the newest steps, and none for a look"
    assert set(looks) == {watchdog.LEAST_S}


def test_the_limit_of_the_watchdog_follows_the_newest_steps(tmp_path: Path) -> None:
    meter = Meter(torch.device("cpu"))
    guard = Watchdog(alone(), tmp_path, meter, after_s=None, on=False)
    assert guard.limit_s == watchdog.FIRST_S
    meter.step_s.extend([0.01] * 3000)
    guard.update_limit()
    assert guard.limit_s == watchdog.LEAST_S
    meter.step_s.extend([60.0] * 1000)
    guard.update_limit()
    assert guard.limit_s == watchdog.FACTOR * 60.0
