"""Data is copied once per node before it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs import trainers

from .conftest import World

FLAGS = ("ddp", "--workload", "lm", "--sequence-length", "16", "--steps", "2", "--batch-size", "4", "--log-every", "1")


def test_one_copy_serves_all_ranks_of_a_node_and_the_next_run(world: World, tmp_path: Path) -> None:
    text, disk = tmp_path / "टाढा.txt", tmp_path / "disk"
    text.write_text("नमस्ते संसार " * 40, encoding="utf-8")
    plain = world(2, *FLAGS, "--text", str(text), run_dir="plain")
    first = world(2, *FLAGS, "--text", str(text), "--stage-to", str(disk), run_dir="first")
    assert (first.codes, first.complaints) == ([0, 0], [])
    assert first.losses() == plain.losses()
    (copy,) = disk.iterdir()
    assert copy.read_bytes() == text.read_bytes()
    written = copy.stat().st_mtime_ns
    again = world(2, *FLAGS, "--text", str(text), "--stage-to", str(disk), run_dir="again")
    assert again.codes == [0, 0]
    assert [path.stat().st_mtime_ns for path in disk.iterdir()] == [written]


def test_a_place_that_takes_no_copy_is_refused_by_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" * 200, encoding="utf-8")
    flags = ["--text", str(text), "--stage-to", str(text), "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", [*FLAGS[1:], *flags]) == 2
    assert f"--stage-to {text}: " in capsys.readouterr().err
