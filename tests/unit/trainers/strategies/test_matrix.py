"""Trainers against a plain loop that shares no code with them, over everything that may change while a run goes on."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hpcjobs.trainers.checkpoint.export import ExportFlags, export

from ..conftest import World, worlds_path
from ..fsdp_here import runnable
from ..matrix_model import COUNT, LR, Net, Surface, squared_error, trace_samples

STRATEGIES = runnable(("ddp", "fsdp", "ddp_scratch", "fsdp_scratch"))
STEPS, EVERY, DECAY, SAMPLE = 21, 2, 0.05, 5


@dataclass(frozen=True)
class Cell:
    strategies: tuple[str, str, str]
    """One of each of three attempts."""
    worlds: tuple[int, int, int]
    optimizer: str
    accumulate: int
    clip: float | None
    precision: str
    kills: tuple[int, int]
    """The steps of the first and the second attempt in which all ranks are killed."""

    @property
    def resumed(self) -> tuple[int, int]:
        """Finished steps of the checkpoints of the first and the second attempt."""
        first = (self.kills[0] - 1) // EVERY * EVERY
        return first, (first + self.kills[1] - 1) // EVERY * EVERY

    def __str__(self) -> str:
        worlds = "-".join(f"{name}{world}" for name, world in zip(self.strategies, self.worlds, strict=True))
        clip = "clipped" if self.clip else "unclipped"
        return f"{worlds} {self.optimizer} x{self.accumulate} {clip} {self.precision} {self.kills}"


def make_cells() -> list[Cell]:
    chance = random.Random(7)
    cells = []
    for strategy, changes, worlds, *rest in itertools.product(
        STRATEGIES, (False, True), ((1, 2, 1), (2, 4, 3)), ("adamw", "sgd"), (1, 2), (None, 0.3), ("fp32", "bf16")
    ):
        later = chance.sample([name for name in STRATEGIES if name != strategy], 2) if changes else [strategy] * 2
        kills = chance.randint(1, 10), chance.randint(1, 8)
        cells.append(Cell((strategy, *later), worlds, *rest, kills))  # type: ignore[arg-type]
    return cells


CELLS = make_cells()
SAMPLED = set(random.Random(1).sample(range(len(CELLS)), SAMPLE))


@dataclass
class Plain:
    """What the plain loop computes: a line per step, and the model."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    seen: list[dict[str, float]]
    """Means over the samples of each step, by which other samples would be noticed."""
    weights: dict[str, torch.Tensor]
    epoch: int
    samples: int
    """Taken from the epoch."""
    taken: int = 0
    """Taken in all."""


def train_plainly(cell: Cell) -> Plain:
    torch.manual_seed(0)
    model, data = Net(), Surface()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
        if cell.optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    )
    done = Plain([], [], [], [], {}, 0, 0)
    step, ends = 0, (*cell.resumed, STEPS)
    for world, end in zip(cell.worlds, ends, strict=True):
        while step < end:
            if done.samples >= COUNT:
                done.epoch, done.samples = done.epoch + 1, 0
            order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(done.epoch)).tolist()
            left = order[done.samples :]
            left += order[: -len(left) % world]
            ranks = [left[rank::world] for rank in range(world)]
            per_rank = 4 * cell.accumulate
            used = done.samples
            for start in range(0, len(ranks[0]), per_rank):
                if step == end:
                    break
                batches = [data.read_batch(mine[start : start + per_rank]) for mine in ranks]
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "bf16"):
                    loss = torch.stack([squared_error(model, batch) for batch in batches]).mean()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cell.clip or float("inf"))
                done.rates.append(LR * (1 - step / (STEPS - 1)))
                optimizer.param_groups[0]["lr"] = done.rates[-1]
                optimizer.step()
                done.losses.append(float(loss.detach()))
                done.norms.append(float(norm))
                traces = [trace_samples(batch) for batch in batches]
                done.seen.append({name: float(torch.stack([one[name] for one in traces]).mean()) for name in traces[0]})
                step += 1
                used, before = min(used + per_rank * world, COUNT), used
                done.taken += used - before
            done.samples = used
    done.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return done


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if number in SAMPLED else pytest.mark.long)
        for number, cell in enumerate(CELLS)
    ],
)
def test_losses_norms_rates_samples_and_weights_are_those_of_a_plain_loop(
    cell: Cell, world: World, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    flags = (
        "--workload", "matrix_model:workload", "--steps", str(STEPS), "--log-every", "1", "--no-probe",
        "--checkpoint-every", str(EVERY), "--no-checkpoint-async", "--lr-schedule", "linear", "--lr-final", "0",
        "--optimizer", cell.optimizer, "--weight-decay", str(DECAY), "--accumulate", str(cell.accumulate),
        "--precision", cell.precision,
        *(("--gradient-norm",) if cell.clip is None else ("--clip-norm", str(cell.clip))),
    )  # fmt: skip
    for number, (strategy, size) in enumerate(zip(cell.strategies, cell.worlds, strict=True)):
        passes = (cell.kills[number] - 1) * cell.accumulate + 1 if number < 2 else 0
        saved = (
            f"checkpoints/step-{cell.resumed[number]:08d}/manifest.json" if number < 2 and cell.resumed[number] else ""
        )
        env = {"PYTHONPATH": worlds_path(), "KILL_AT": str(passes), "KILL_AFTER": str(tmp_path / "run" / saved)}
        ended = world(size, strategy, *flags, env=env)
        if number < 2:
            assert any(code == -9 for code in ended.codes), ended.err
        else:
            assert ended.codes == [0] * size, ended.err
    expected, lines = train_plainly(cell), ended.lines("step")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    exact = cell.precision == "fp32"
    assert [line["lr"] for line in lines] == pytest.approx(expected.rates)
    assert ended.losses() == pytest.approx(expected.losses, rel=1e-4 if exact else 0.1, abs=0 if exact else 0.03)
    for name in ("numbers", "squares"):
        seen = [line["metrics"][name] for line in lines]  # type: ignore[index]
        assert seen == pytest.approx([one[name] for one in expected.seen], rel=1e-5)
    assert ended.summary.samples == expected.taken
    norms = [line["metrics"]["gradient_norm"] for line in lines]  # type: ignore[index]
    assert norms == pytest.approx(expected.norms, rel=1e-3 if exact else 0.3, abs=0 if exact else 0.1)
    assert ended.summary.resumed_from_step == (cell.resumed[1] or None)
    path = tmp_path / "model.safetensors"
    export(ExportFlags(out=str(path)), ended.run_dir)
    for name, tensor in safetensors.load_file(path).items():
        close = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 0.1, "atol": 0.05}
        assert torch.allclose(tensor.float(), expected.weights[name], **close), name
