"""Lines of logs: chosen, read from the end, and followed through requeues."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from hpcjobs.run import logs
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import Tail, find_start, line_time
from hpcjobs.run.logs import Selection, follow, lines, merge_ranks
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, Submitted


def log(folder: Path, text: str, *, job_id: str = "7") -> Path:
    path = folder / "logs" / f"x_{job_id}.out"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def job(folder: Path, *, array: str | None = None) -> Entry:
    return Entry(job_id="7", name="x", site="s", scheduler="slurm", run_dir=str(folder), submitted=0.0, array=array)


def test_the_last_lines_are_those_that_were_asked_for(tmp_path: Path) -> None:
    log(tmp_path, "".join(f"{n % 4}: step {n}\n" for n in range(100)))
    entry = job(tmp_path)
    assert list(lines(entry, selection=Selection(last=2))) == ["2: step 98\n", "3: step 99\n"]
    assert list(lines(entry, selection=Selection(last=2, rank=1))) == ["step 93\n", "step 97\n"]
    expected = Selection(last=1, pattern=re.compile(r"^step \d0$"))
    assert list(lines(entry, selection=expected)) == ["2: step 90\n"]
    assert list(lines(entry, selection=Selection(last=0))) == []
    assert len(list(lines(entry, selection=Selection(last=1000)))) == 100


@pytest.mark.parametrize(
    "text", ["", "one", "one\n", "\n", "\n\n", "one\n\ntwo", "a" * 70_000 + "\nb\n" + "c" * 140_000]
)
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_the_last_lines_of_odd_files_are_those_of_the_file_read_in_full(tmp_path: Path, text: str, count: int) -> None:
    path = log(tmp_path, text)
    complete = text.removesuffix("\n").split("\n") if text else []
    start = find_start(path, count=count, accepts=lambda _: True)
    expected = complete[-count:] if count else []
    assert list(Tail(path, start=start).news(last=True)) == [line + "\n" for line in expected]


def test_the_end_of_a_large_log_is_followed_without_reading_its_past_into_memory(tmp_path: Path) -> None:
    path = log(tmp_path, "")
    with path.open("wb") as file:
        for _ in range(64):
            file.write(b"x" * 1023 + b"\n" + b"y" * ((1 << 20) - 1025) + b"\n")
    tracemalloc.start()
    try:
        assert len(list(lines(job(tmp_path), selection=Selection(last=1)))) == 1
        assert sum(1 for _ in lines(job(tmp_path))) == 128
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4


def test_since_begins_behind_the_last_line_that_is_older(tmp_path: Path) -> None:
    now = time.time()
    old, new = (time.strftime("%F %T", time.localtime(now - ago)) for ago in (3600, 60))
    log(tmp_path, f"0: {old} begin\n0: {old} step\n0: {new},123 step\n0: Traceback\n")
    assert list(lines(job(tmp_path), selection=Selection(since=now - 600))) == [
        f"0: {new},123 step\n",
        "0: Traceback\n",
    ]
    assert len(list(lines(job(tmp_path), selection=Selection(since=now - 7200)))) == 4
    assert list(lines(job(tmp_path), selection=Selection(since=now - 600, last=1))) == ["0: Traceback\n"]
    assert list(lines(job(tmp_path), selection=Selection(since=now + 600))) == []


def test_the_time_of_a_line_is_local_or_that_of_its_zone() -> None:
    assert line_time(b"1970-01-02T00:00:10Z x") == 86410
    assert line_time(b"[1970/01/02 01:00:10.5+01:00] x") == 86410
    local = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
    assert line_time(b"3: 2026-03-01 12:00:00,001 - INFO") == local
    assert line_time(b"2026-02-31 12:00:00") is None
    assert line_time(b"step 2026, loss 3") is None


class Requeuing:
    """A scheduler that has requeued job 7, which then ends when the log has been read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.queued = folder, 0.0, True

    def connect(self, scheduler: str, slurm_conf: str | None) -> Scheduler:
        return self

    def submit(self, plan: object) -> Submitted:
        raise AssertionError

    def cancel(self, job_ids: object) -> None:
        raise AssertionError

    def has_accounting(self) -> bool:
        return True

    def show_jobs(self, job_ids: list[str]) -> list[JobRecord]:
        return []

    def find_submitted(self, plan: object) -> list[Submitted]:
        return []

    def queue(self) -> list[JobRecord]:
        return [JobRecord("7", State.PENDING, source="squeue", submitted=0.0)] if self.queued else []

    def account(self, job_ids: object) -> list[JobRecord]:
        return [] if self.queued else [JobRecord("7", State.COMPLETED, source="sacct", submitted=0.0, exit_code=0)]

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.queued and self.now > 1:
            self.queued = False
            write_end(self.folder, State.COMPLETED, ended=2.0)
            with (self.folder / "logs" / "x_7.out").open("a") as file:
                file.write("second start\n")


def write_end(folder: Path, state: State, *, ended: float) -> None:
    end = {"job_id": "7", "state": state.value, "exit_code": 1, "started": 0, "ended": ended, "nodes": "n1"}
    (folder / "state.json").write_text(json.dumps(end))


def test_a_job_that_is_requeued_is_followed_on_to_its_end(tmp_path: Path) -> None:
    log(tmp_path, "first start\n")
    write_end(tmp_path, State.CANCELLED, ended=1.0)
    slurm = Requeuing(tmp_path)
    came = list(follow(job(tmp_path), connect=slurm.connect, clock=lambda: slurm.now, pause=slurm.pause))
    assert came == ["first start\n", "second start\n"]


def test_equal_lines_of_several_ranks_are_one_line_and_each_ranks_order_stays() -> None:
    lines = ["0: a\n", "0: b\n", "1: a\n", "hpcjobs: note\n", "1: b\n", "02: a\n", "1: b\n", "0: a\n", "5: a\n"]
    assert list(merge_ranks(lines)) == [
        "0-1: a\n",
        "0: b\n",
        "hpcjobs: note\n",
        "1: b\n",
        "0,2,5: a\n",
        "1: b\n",
    ]


def test_merging_holds_back_a_bounded_number_of_lines() -> None:
    source = (f"0: {n}\n" for n in count())
    assert next(iter(merge_ranks(source))) == "0: 0\n"
    assert next(source) == "0: 5001\n"


def test_lines_that_ranks_print_in_blocks_are_merged() -> None:
    """A program whose output is no terminal writes some thousand characters at once."""
    blocks = [range(first, first + 1000) for first in range(0, 10_000, 1000)]
    lines = (f"{rank}: step {step}\n" for block in blocks for rank in (1, 0) for step in block)
    assert list(merge_ranks(lines)) == [f"0-1: step {step}\n" for step in range(10_000)]


def test_lines_of_one_rank_alone_do_not_end_the_merging_of_a_rank_that_is_behind() -> None:
    def printed(rank: int) -> Iterator[str]:
        for step in range(1000):
            yield f"{rank}: step {step}\n"
            if step % 10 == 0:
                yield f"{rank}: pid {1000 * rank + step}\n"

    ahead, behind = list(printed(0)), list(printed(1))
    lines = [*ahead[:50], *(line for pair in zip(ahead[50:], behind, strict=False) for line in pair), *behind[-50:]]
    merged = list(merge_ranks(lines))
    assert [line for line in merged if "step" in line] == [f"0-1: step {step}\n" for step in range(1000)]
    for rank, own in ((0, ahead), (1, behind)):
        of_rank = [line.partition(": ")[2] for line in merged if str(rank) in line.partition(":")[0].replace("-", ",")]
        assert of_rank == [line.partition(": ")[2] for line in own]


@pytest.mark.parametrize("seed", range(5))
def test_merging_loses_no_line_and_keeps_the_order_of_each_rank(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_HELD", 7)
    chance = random.Random(seed)
    own: dict[str, list[str]] = {"0": [], "1": [], "2": []}
    lines = []
    for _ in range(400):
        rank, text = chance.choice("012"), chance.choice(["a", "b", "c", "d", "e"]) + "\n"
        own[rank].append(text)
        lines.append(f"{rank}: {text}")
    printed: dict[str, list[str]] = {"0": [], "1": [], "2": []}
    for line in merge_ranks(lines):
        label, _, text = line.partition(": ")
        for rank in "012" if label == "0-2" else re.split("[,-]", label):
            printed[rank].append(text)
    assert printed == own


def test_the_hour_of_a_line_is_no_rank(tmp_path: Path) -> None:
    dated = ["12:30:45 a\n", "12:30:45,123 b\n", "12:31 c\n"]
    assert list(merge_ranks(dated)) == dated
    log(tmp_path, "".join(dated))
    assert list(lines(job(tmp_path), rank=12)) == []
    assert list(lines(job(tmp_path), selection=Selection(pattern=re.compile("^12:30")))) == dated[:2]


def test_a_long_line_without_an_end_is_read_in_linear_time_and_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    path.write_bytes(b"50 %\r" * (8 << 20))
    tail = Tail(path)
    began = time.process_time()
    pieces = list(tail.news(last=False))
    first_s = time.process_time() - began
    assert first_s < 5
    began = time.process_time()
    assert [list(tail.news(last=False)) for _ in range(20)] == [[]] * 20
    assert time.process_time() - began < max(first_s, 0.1)
    assert "".join([*pieces, *tail.news(last=True)]) == "50 %\r" * (8 << 20) + "\n"


def measure_peak(lines: Iterator[str]) -> tuple[int, int]:
    """The most memory that was held while ``lines`` came, and the length of all of them."""
    tracemalloc.start()
    try:
        length = sum(map(len, lines))
        return tracemalloc.get_traced_memory()[1], length
    finally:
        tracemalloc.stop()


def test_a_log_without_the_end_of_a_line_is_not_held_in_memory(tmp_path: Path) -> None:
    entry, path = job(tmp_path), log(tmp_path, "")
    bar = "\rstep ü of 9999999".encode()
    path.write_bytes(b"0: " + bar * (48_000_000 // len(bar)))
    peak, length = measure_peak(lines(entry))
    assert length == len(path.read_bytes().decode()) + 1, "nothing is lost, and no character is cut"
    assert peak < 35e6, f"{peak / 1e6:.0f} MB"
    peak, _ = measure_peak(lines(entry, selection=Selection(last=3)))
    assert peak < 35e6, f"{peak / 1e6:.0f} MB for the last lines"
    _, other = measure_peak(lines(entry, selection=Selection(rank=1)))
    assert other == 0, "pieces belong to the rank of their line"
    _, own = measure_peak(lines(entry, rank=0))
    assert own == length - 3


def test_the_pieces_of_a_long_line_are_the_line(tmp_path: Path) -> None:
    text = "".join(f"{number:07d}ü█" for number in range(1_200_000))
    (tmp_path / "log").write_text(f"{text}\nafter\n{text}", encoding="utf-8")
    assert "".join(Tail(tmp_path / "log").news(last=True)) == f"{text}\nafter\n{text}\n"
