"""Ranks that agree where to stop, whoever hears the signal and however far they are apart."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs.runtime import signals
from hpcjobs.runtime.signals import Board, FileBoard, Stop, StopAgreement, name_attempt


class Memory:
    """A board in this process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def write(self, name: str, text: str) -> None:
        self.texts[name] = text

    def read(self, name: str) -> str | None:
        return self.texts.get(name)


def make_ranks(board: Board, size: int, *, apart: int = 1) -> list[StopAgreement]:
    return [
        StopAgreement(Stop(), rank=rank, world_size=size, open_board=lambda: board, reduce=None, apart=apart)
        for rank in range(size)
    ]


def run_until_all_stop(ranks: list[StopAgreement], *, seed: int, apart: int) -> list[int]:
    """Boundaries at which the ranks stop: they advance in random order, never more than ``apart`` apart."""
    order = random.Random(seed)
    passed = [0] * len(ranks)
    signalled = {order.randrange(len(ranks)): order.randrange(20) for _ in range(order.randrange(1, 3))}
    while running := [n for n, one in enumerate(ranks) if one.why is None]:
        slowest = min(passed)
        n = order.choice([n for n in running if passed[n] - slowest < apart or passed[n] == slowest])
        if signalled.get(n) == passed[n]:
            ranks[n].stop.requested = "SIGUSR1"
        passed[n] += 1
        ranks[n].decide()
        assert max(passed) < 200, "nobody stops"
    return passed


@pytest.mark.parametrize("apart", [1, 3])
def test_all_ranks_stop_at_the_same_boundary_whoever_hears_the_signal(
    apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "LOOK_S", 0.0)
    for seed in range(100):
        stopped = run_until_all_stop(make_ranks(Memory(), 4, apart=apart), seed=seed, apart=apart)
        assert len(set(stopped)) == 1, (seed, stopped)


def test_the_board_of_files_gives_a_text_only_once_it_is_complete(tmp_path: Path) -> None:
    first, second = FileBoard(tmp_path / "board", rank=0), FileBoard(tmp_path / "board", rank=1)
    assert second.read("announced") is None
    (tmp_path / "board" / "announced").write_text("1")
    assert second.read("announced") is None
    first.write("announced", "12")
    assert second.read("announced") == "12"


def test_ranks_that_agree_over_files_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "LOOK_S", 0.0)
    folder = tmp_path / "board"

    def make_rank(rank: int) -> StopAgreement:
        return StopAgreement(
            Stop(), rank=rank, world_size=2, open_board=lambda: FileBoard(folder, rank=rank), reduce=None, apart=1
        )

    ranks = [make_rank(0), make_rank(1)]
    assert len(set(run_until_all_stop(ranks, seed=3, apart=1))) == 1
    for rank in ranks:
        rank.close()
    assert not folder.exists()


def test_a_board_that_a_killed_start_of_the_same_name_has_left_stops_nobody(tmp_path: Path) -> None:
    """Started by hand, again on torchrun's usual port."""
    script = tmp_path / "train.py"
    script.write_text(
        "import hpcjobs.runtime, os\n"
        f"os.environ['HPCJOBS_RUN_DIR'] = {str(tmp_path)!r}\n"
        "os.environ['MASTER_PORT'] = '29500'\n"
        "run = hpcjobs.runtime.start()\n"
        "rank, other = os.environ['RANK'], '1' if os.environ['RANK'] == '0' else '0'\n"
        "for step in range(1, 9):\n"
        "    open(f'{rank}-{step}', 'w').close()\n"
        "    while not os.path.exists(f'{other}-{step}'):\n"
        "        pass\n"
        "    if run.should_stop():\n"
        "        run.leave()\n"
        "run.finish()\n"
    )
    board = tmp_path / ".stop-hand-0-29500"
    board.mkdir()
    for name, text in (("0", "5"), ("1", "5"), ("request", "SIGTERM"), ("announced", "2")):
        (board / name).write_text(f"{text}\n")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("HPCJOBS_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "hpcjobs.runtime.spawn", "--ntasks", "2", "--", sys.executable, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "stopped by" in done.stdout) == (0, False), done
    assert not board.exists()


def test_a_reduction_is_asked_at_every_boundary_and_decides() -> None:
    calls: list[int] = []

    def reduce(mine: int) -> int:
        calls.append(mine)
        return 1 if len(calls) == 3 else mine

    one = StopAgreement(Stop(), rank=1, world_size=2, open_board=Memory, reduce=reduce, apart=1)
    assert [one.decide() for _ in range(4)] == [False, False, True, True]
    assert calls == [0, 0, 0]


def test_ranks_further_apart_than_was_said_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    board = Memory()
    (one,) = make_ranks(board, 2)[1:]
    one.stop.requested = "SIGTERM"
    for _ in range(5):
        one.decide()
    board.write("announced", "3")
    assert one.decide()
    assert "warning: rank 1 stops 3 steps after the others" in capfd.readouterr().err


def test_every_start_of_a_job_has_a_name_of_its_own_that_all_ranks_share() -> None:
    job = {"HPCJOBS_JOB_ID": "12_3", "MASTER_PORT": "20001"}
    starts = (job, job | {"SLURM_RESTART_COUNT": "1"}, job | {"MASTER_PORT": "20002"})
    assert len({name_attempt(env) for env in starts}) == 3
    assert name_attempt(job | {"RANK": "0"}) == name_attempt(job | {"RANK": "1"})
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}  # of the agent whose rank failed; that of the others stays at 0
    assert name_attempt(job | {"TORCHELASTIC_RESTART_COUNT": "0"}) == name_attempt(job | restarted)
