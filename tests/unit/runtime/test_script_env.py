"""GPUs that a script sees, by the variables of its job."""

from __future__ import annotations

import pytest

from hpcjobs.runtime.dist import count_gpus


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("0,1", 2),
        ("GPU-8f5d1c22-a8b0,GPU-1b2c3d44-e5f6", 2),
        ("MIG-5c89852c-d268,MIG-9f0e1d2c-b3a4", 1),  # CUDA shows the first slice and no other
        ("MIG-GPU-8f5d1c22/1/0", 1),
        ("NoDevFiles", 0),
        ("", 0),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(listed: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert count_gpus() == count
