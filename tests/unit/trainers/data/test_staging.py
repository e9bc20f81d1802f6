"""Data is copied once per node before it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs import trainers

from ..conftest import Runs

FLAGS = ("--workload", "lm", "--sequence-length", "16", "--steps", "2", "--batch-size", "4", "--log-every", "1")


def test_one_copy_serves_all_ranks_of_a_node_and_the_next_run(two_ranks: Runs, tmp_path: Path) -> None:
    text, disk = tmp_path / "टाढा.txt", tmp_path / "disk"
    text.write_text("नमस्ते संसार " * 40, encoding="utf-8")
    reading = (*FLAGS, "--text", str(text))
    two_ranks.run(("plain", "ddp", reading), ("first", "ddp", (*reading, "--stage-to", str(disk))))
    (copy,) = disk.iterdir()
    assert copy.read_bytes() == text.read_bytes()
    written = copy.stat().st_mtime_ns
    two_ranks.run(("again", "ddp", (*reading, "--stage-to", str(disk))))
    assert two_ranks["first"].losses() == two_ranks["plain"].losses() == two_ranks["again"].losses()
    assert [path.stat().st_mtime_ns for path in disk.iterdir()] == [written]


def test_a_place_that_takes_no_copy_is_refused_by_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" * 200, encoding="utf-8")
    flags = ["--text", str(text), "--stage-to", str(text), "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", [*FLAGS, *flags]) == 2
    assert f"--stage-to {text}: " in capsys.readouterr().err
