"""Compressed gradients: fewer bytes, nearly the same losses; what a backend can't do is refused."""

from __future__ import annotations

import pytest

from .conftest import World

FLAGS = ("ddp", "--workload", "lm", "--sequence-length", "32", "--steps", "15", "--log-every", "1", "--no-probe")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_the_bytes_travel_and_the_losses_stay_close(kind: str, world: World) -> None:
    plain = world(2, *FLAGS, run_dir="plain")
    small = world(2, *FLAGS, "--compress", kind, run_dir="small")
    assert (small.codes, small.complaints) == ([0, 0], [])
    assert plain.summary.bytes_moved_per_step is not None
    assert small.summary.bytes_moved_per_step == plain.summary.bytes_moved_per_step // 2
    assert small.losses() == pytest.approx(plain.losses(), rel=1e-2)
    assert small.losses() != plain.losses()


def test_powersgd_on_gloo_is_refused_by_one_line(world: World) -> None:
    ended = world(2, *FLAGS, "--compress", "powersgd")
    assert ended.codes == [2, 2]
    assert len(ended.complaints) == 1
    assert "--compress powersgd" in ended.complaints[0]
    assert "Hint: --compress bf16" in ended.complaints[0]
