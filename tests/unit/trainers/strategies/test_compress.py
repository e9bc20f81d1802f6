"""Compressed gradients: fewer bytes, nearly the same losses; what a backend can't do is refused."""

from __future__ import annotations

import pytest

from ..conftest import Runs, World

FLAGS = ("--workload", "lm", "--sequence-length", "32", "--steps", "15", "--log-every", "1", "--no-probe")


def test_half_the_bytes_travel_and_the_losses_stay_close(two_ranks: Runs) -> None:
    two_ranks.run(*((kind, "ddp", (*FLAGS, "--compress", kind)) for kind in ("none", "bf16", "fp16")))
    plain = two_ranks["none"]
    assert plain.summary.bytes_moved_per_step is not None
    for kind in ("bf16", "fp16"):
        small = two_ranks[kind]
        assert small.summary.bytes_moved_per_step == plain.summary.bytes_moved_per_step // 2
        assert small.losses() == pytest.approx(plain.losses(), rel=1e-2)
        assert small.losses() != plain.losses()


def test_powersgd_on_gloo_is_refused_by_one_line(world: World) -> None:
    ended = world(2, "ddp", *FLAGS, "--compress", "powersgd")
    assert ended.codes == [2, 2]
    assert len(ended.complaints) == 1
    assert "--compress powersgd" in ended.complaints[0]
    assert "Hint: --compress bf16" in ended.complaints[0]
