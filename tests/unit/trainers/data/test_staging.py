"""Data is copied once per node before it is read."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hpcjobs import trainers
from hpcjobs.run.progress import read_staging
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import TrainerError
from hpcjobs.trainers.data import staging
from hpcjobs.trainers.data.staging import CopyProgress, Staging
from hpcjobs.trainers.distributed import RankGroup

from ..conftest import Runs, World

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


def test_the_error_of_the_rank_that_copies_ends_all_and_is_reported_once(world: World, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" * 200, encoding="utf-8")
    outcome = world(2, "ddp", *FLAGS, "--text", str(text), "--stage-to", str(text))
    assert outcome.codes == [2, 2]
    (complaint,) = outcome.complaints
    assert f"--stage-to {text}: [Errno 17] File exists" in complaint
    assert "rank 0 on " in complaint


def make_ranks(hosts: Sequence[str]) -> list[RankGroup]:
    store = HashStore()
    places = [DistEnv(rank, 0, len(hosts), 1, 0, "a", 1, "test") for rank in range(len(hosts))]
    return [RankGroup(place, tuple(hosts), torch.device("cpu"), "gloo", store) for place in places]


def stage_all(works: Sequence[Callable[[], dict[str, str]]]) -> list[dict[str, str] | TrainerError]:
    """What each rank gets, all at once."""
    results: list[dict[str, str] | TrainerError] = [{} for _ in works]

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except TrainerError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_each_node_has_a_copy_of_its_own_and_all_ranks_start_together(tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (source / "a.bin").write_bytes(b"a" * 100)
    groups = make_ranks(["n1", "n1", "n2", "n2"])
    disks = {host: tmp_path / host for host in ("n1", "n2")}
    results = stage_all(
        [lambda group=group: Staging(group, disks[group.hosts[group.rank]]).stage([source]) for group in groups]  # type: ignore[misc]
    )
    assert results[0] == results[1]
    assert results[2] == results[3]
    for result, host in ((results[0], "n1"), (results[2], "n2")):
        assert isinstance(result, dict)
        copy = Path(result[str(source)])
        assert copy.parent == disks[host]
        assert (copy / "a.bin").read_bytes() == b"a" * 100


def test_the_error_of_one_nodes_copy_reaches_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    source = tmp_path / "data.txt"
    source.write_text("a" * 100)
    (tmp_path / "n2").write_text("no folder")
    groups = make_ranks(["n1", "n2", "n2"])
    results = stage_all(
        [lambda group=group: Staging(group, tmp_path / group.hosts[group.rank]).stage([source]) for group in groups]  # type: ignore[misc]
    )
    texts = {str(result) for result in results}
    assert len(texts) == 1
    assert "(rank 1 on n2)" in texts.pop()
    assert [result.code for result in results if isinstance(result, TrainerError)] == [2, 2, 2]


def test_a_rank_that_was_killed_while_it_copied_ends_the_others_with_its_name(tmp_path: Path) -> None:
    """Rank 1 has reported once, and no more."""
    groups = make_ranks(["n1", "n2", "n2"])
    Staging(groups[1], tmp_path)._report(CopyProgress(10, 100, 5, 50))
    works = [lambda group=groups[rank]: Staging(group, tmp_path, silent_s=0.2).stage([]) for rank in (0, 2)]  # type: ignore[misc]
    results = stage_all(works)
    assert [result.code for result in results if isinstance(result, TrainerError)] == [18, 18]
    for result in results:
        assert "rank 1 on n2, which copies data for --stage-to, has not reported" in str(result)


def test_a_slow_copy_is_waited_for_and_shown_in_the_log_and_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(staging, "LOG_S", 0.05)
    groups = make_ranks(["n1", "n2"])
    shown: list[str] = []

    def copy_slowly() -> dict[str, str]:
        slow = Staging(groups[1], tmp_path / "n2")
        until = time.monotonic() + 60
        while not shown and time.monotonic() < until:
            slow._report(CopyProgress(4000, 10_000, 1_200_000_000, 3_000_000_000))
            progress = read_staging(tmp_path)
            shown.extend([] if progress is None else [str(progress)])
            time.sleep(0.02)
        return slow.stage([])

    results = stage_all([lambda: Staging(groups[0], tmp_path / "n1", silent_s=5.0).stage([]), copy_slowly])
    assert results == [{}, {}]
    assert shown == ["copied to the nodes' disks: 1 of 2 ready; n2: 4,000 of 10,000 files, 1.1G of 2.8G"]
    assert "staging: 1 of 2 nodes ready; n2: 4,000 of 10,000 files, 1.2 of 3 GB" in capsys.readouterr().out
    assert not (tmp_path / "staging.json").exists()


def test_a_run_folder_that_takes_no_progress_file_ends_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr(staging, "LOG_S", 0.0)
    groups = make_ranks(["n1", "n2"])
    shown = threading.Event()
    monkeypatch.setattr(groups[0].__class__, "log", lambda group, text: shown.set() if "warning" in text else None)

    def copy_later() -> dict[str, str]:
        assert shown.wait(60)
        return Staging(groups[1], tmp_path / "n2").stage([])

    assert stage_all([lambda: Staging(groups[0], tmp_path / "n1").stage([]), copy_later]) == [{}, {}]


def test_a_progress_file_that_is_cut_off_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "staging.json").write_text(json.dumps({"nodes": 2})[:-3])
    assert read_staging(tmp_path) is None
