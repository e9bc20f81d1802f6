"""Checkpoints on disks that are too small, in every size: a kernel's own ENOSPC at each write of kit and trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import environment

HERE = Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        ("kit", 1), ("kit", 2), ("kit", 3), ("ddp", 1),
        *(pytest.param("ddp", keep, marks=pytest.mark.long) for keep in (2, 3)),
    ],
)  # fmt: skip
def test_a_disk_too_small_leaves_a_sound_checkpoint_and_with_room_the_next_start_completes_the_run(
    tmp_path: Path, kind: str, keep: int
) -> None:
    if kind == "ddp":
        pytest.importorskip("torch")
    env = environment(PYTHONPATH=str(HERE.parent / "trainers"))
    done = subprocess.run(
        [sys.executable, str(HERE / "full_disk.py"), kind, str(keep)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert {trial["code"] for trial in trials} == {0, 20}, "some disks are too small, others not"
    assert any(trial["sound"] == [1] for trial in trials), "some have room for the first checkpoint alone"
    for trial in trials:
        newest = max(trial["completed"], default=None)
        assert max(trial["sound"], default=None) == newest, trial
        assert trial["code"] == 20 or newest == 3, trial
        assert "Traceback" not in trial["output"], trial
        assert trial["again"] == 0, trial
        assert f"resumed at {newest}" in trial["output_again"] or kind != "kit" or newest is None, trial
        assert trial["then"] == [3, 2, 1][: min(keep, len(trial["then"]))], trial
