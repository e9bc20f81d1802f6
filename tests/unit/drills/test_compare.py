"""Whether two runs of one program had the same losses."""

from __future__ import annotations

import json
from pathlib import Path

from hpcjobs.run.drill import compare


def run_of(folder: Path, *lines: tuple[int, float]) -> Path:
    folder.mkdir()
    log_lines = [{"kind": "run"}, *({"kind": "step", "step": step, "loss": loss} for step, loss in lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log_lines))
    return folder


def test_a_run_that_was_stopped_between_two_lines_has_the_same_losses(tmp_path: Path) -> None:
    alone = run_of(tmp_path / "alone", (10, 3.0), (20, 2.0), (30, 1.1))
    stopped = run_of(tmp_path / "stopped", (10, 3.0), (14, 2.5), (20, 10 / 6), (30, 1.1))
    assert compare(alone, stopped) == (3, 0.0)


def test_another_loss_is_seen_and_so_is_a_run_without_any(tmp_path: Path) -> None:
    alone = run_of(tmp_path / "alone", (10, 2.0), (20, 1.0))
    assert compare(alone, run_of(tmp_path / "other", (10, 2.0), (20, 1.01))) == (2, 0.010000000000000009)
    assert compare(alone, tmp_path / "nothing") == (0, float("inf"))
