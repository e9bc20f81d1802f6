"""Exposed communication is measured without a trace in the training."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers import profiler
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.profiler import Probe, measure_free_bytes

from ..conftest import Runs
from ..fsdp_here import needs_fsdp, runnable

FLAGS = ("--workload", "worlds:noisy_points", "--log-every", "1", "--steps", "40", "--accumulate", "2")


def test_losses_with_the_probe_are_those_without_it(two_ranks: Runs) -> None:
    for trainer in runnable(("ddp", "ddp_scratch", "fsdp", "fsdp_scratch")):
        probed, plain = f"{trainer} probed", f"{trainer} plain"
        two_ranks.run((probed, trainer, (*FLAGS, "--probe-every", "4")), (plain, trainer, (*FLAGS, "--no-probe")))
        assert two_ranks[probed].losses() == two_ranks[plain].losses()
        assert len(two_ranks[probed].losses()) == 40
        measured = two_ranks[probed].summary.exposed_communication_s
        assert measured is not None
        assert measured.count == 11
        assert two_ranks[plain].summary.exposed_communication_s is None


class FakeCuda:
    """A GPU of 80 GB: 10 are free, and of the 65 that the allocator holds a step needs 60 at most."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10 * 10**9, 80 * 10**9

    def memory_reserved(self, device: torch.device) -> int:
        return 65 * 10**9

    def max_memory_allocated(self, device: torch.device) -> int:
        return 60 * 10**9


def test_free_memory_is_what_the_largest_step_so_far_leaves() -> None:
    assert measure_free_bytes(torch.device("cuda"), 4, cuda=FakeCuda()) == 15e9


@pytest.mark.parametrize(("needed", "measures"), [(0, True), (13e9, True), (14e9, False)])
def test_sharded_weights_are_not_completed_where_a_tenth_of_the_free_memory_would_not_stay_free(
    needed: float, measures: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiler, "measure_free_bytes", lambda *_: 15e9)
    group = RankGroup(DistEnv(0, 0, 1, 1, 0, "a", None, "none"), ("a",), torch.device("cpu"), "gloo")
    strategy = SimpleNamespace(quiet_passes=True, quiet_pass_bytes=lambda model: needed)
    stepper: Any = SimpleNamespace(strategy=strategy, model=nn.Linear(1, 1))
    assert Probe(1, stepper, group).fits() is measures
    assert ("exposed communication is not measured" in capsys.readouterr().out) is not measures


@needs_fsdp
def test_what_fsdp_sends_is_what_its_summary_says(two_ranks: Runs) -> None:
    flags = ("--workload", "faulty:counted", "--steps", "8", "--no-probe")
    two_ranks.run(("dropped", "fsdp", flags), ("kept", "fsdp", (*flags, "--no-reshard-after-forward")))
    for folder in ("dropped", "kept"):
        counted = json.loads((two_ranks.root / folder / "counted.json").read_text(encoding="utf-8"))
        summary = two_ranks[folder].summary
        assert [summary.bytes_moved_per_step, summary.collectives_per_step] == counted
