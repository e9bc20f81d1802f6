"""What does a checkpoint cost a training that goes on: time stood still, and steps slowed while it is written?

python benchmarks/checkpoint.py    a state of 337 MiB, steps of about 400 ms on one thread; torch.save is the baseline

Each contestant saves once ahead of `STEPS` steps and has to be on disk at the end; lost time is what that takes longer
than the same steps without a save in the same round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch
from harness import compete, parse_no_arguments, report
from torch.distributed.checkpoint.state_dict_saver import async_save

from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.trainers.checkpoint import CheckpointWriter

STATE_MIB = 337
STEPS = 8
STEP_S = 0.4
ROUNDS = int(os.environ.get("ROUNDS", "11"))
MOMENT = CheckpointMeta(step=1, epoch=0, epoch_samples=0, world_size=1, metrics_bytes=0, loss=None)

Save = Callable[[dict[str, torch.Tensor]], Callable[[], object]]
"""Saves; what it returns waits until all is on disk."""


class Cost(NamedTuple):
    """Seconds: training stands still; each step that was slower than without a save, added up."""

    stall: float
    slowed: float


class Training:
    """Steps that compute and touch no disk; as many matrix products as make a step on this machine."""

    def __init__(self) -> None:
        self._matrix = torch.randn(1024, 1024)
        began = time.perf_counter()
        for _ in range(20):
            self._product()
        self._products = max(1, round(20 * STEP_S / (time.perf_counter() - began)))

    def _product(self) -> None:
        torch.mm(self._matrix, self._matrix)

    def steps_s(self) -> list[float]:
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            for _ in range(self._products):
                self._product()
            taken.append(time.perf_counter() - began)
        return taken


def by_torch_save(folder: Path, *, synced: bool) -> Save:
    def save(state: dict[str, torch.Tensor]) -> Callable[[], object]:
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        return lambda: None

    return save


def by_dcp(folder: Path) -> Save:
    def save(state: dict[str, torch.Tensor]) -> Callable[[], object]:
        written = async_save(state, checkpoint_id=folder / "dcp", no_dist=True)
        return lambda: written.result()  # type: ignore[union-attr]

    return save


def by_us(folder: Path, *, background: bool) -> Save:
    """Synced, checksummed, renamed into place; in the background from a copy in buffers that are kept."""
    saver = CheckpointWriter(folder / f"ours-{background}", keep=1, background=background)

    def save(state: dict[str, torch.Tensor]) -> Callable[[], object]:
        saver.save(MOMENT, {"model": state}, last=True)
        return saver.wait

    return save


def cost(save: Save, state: dict[str, torch.Tensor], training: Training) -> Cost:
    undisturbed = statistics.median(training.steps_s())
    began = time.perf_counter()
    wait = save(state)
    stall = time.perf_counter() - began
    slowed = sum(max(0.0, step - undisturbed) for step in training.steps_s())
    began = time.perf_counter()
    wait()
    return Cost(stall + time.perf_counter() - began, slowed)


def main() -> int:
    parse_no_arguments(__doc__)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    torch.set_num_threads(1)
    state = {f"layer{n}": torch.randn(STATE_MIB << 18 >> 4) for n in range(16)}
    training, folder = Training(), Path(mkdtemp(dir=os.environ.get("BENCH_DIR")))
    saves = {
        "torch.save": by_torch_save(folder, synced=False),
        "torch.save and fsync": by_torch_save(folder, synced=True),
        "dcp.async_save": by_dcp(folder),
        "hpcjobs, synchronous": by_us(folder, background=False),
        "hpcjobs": by_us(folder, background=True),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in saves}

    def lost_s(name: str) -> float:
        costs[name].append(cost(saves[name], state, training))
        return sum(costs[name][-1])

    try:
        contestants = {name: (lambda name=name: lost_s(name)) for name in saves}
        outcome = compete("torch.save", contestants, rounds=ROUNDS)
    finally:
        shutil.rmtree(folder)
    report(f"time lost to a checkpoint of {STATE_MIB} MiB, with steps of about {STEP_S:g} s", outcome, unit="s")
    for name, taken in costs.items():
        stall, slowed = (statistics.median(part) for part in zip(*taken, strict=True))
        print(f"{name:44} stands still {stall:.3f} s, steps slower by {slowed:.3f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
