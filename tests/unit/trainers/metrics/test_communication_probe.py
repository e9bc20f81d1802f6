"""Exposed communication is measured without a trace in the training."""

from __future__ import annotations

import json

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


@needs_fsdp
def test_what_fsdp_sends_is_what_its_summary_says(two_ranks: Runs) -> None:
    flags = ("--workload", "faulty:counted", "--steps", "8", "--no-probe")
    two_ranks.run(("dropped", "fsdp", flags), ("kept", "fsdp", (*flags, "--no-reshard-after-forward")))
    for folder in ("dropped", "kept"):
        counted = json.loads((two_ranks.root / folder / "counted.json").read_text(encoding="utf-8"))
        told = two_ranks[folder].summary
        assert [told.bytes_moved_per_step, told.collectives_per_step] == counted
