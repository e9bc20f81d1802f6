"""Every strategy, at every world size, gives the loss curve of one process alone.

Weights, samples and their order are the same, so only the order of additions differs: fp32 curves of 50
steps agree to 2e-4 relative, and with bf16 compute to 3e-2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcjobs.runtime.summary import RunSummary

from .conftest import REPOSITORY, Outcome, free_port, start_rank

TRAINERS = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch")
LM = ("--workload", "lm", "--preset", "tiny", "--sequence-length", "32", "--train-samples", "1024")
MNIST = ("--workload", "mnist")
EVERY_STEP = ("--log-every", "1", "--clip-norm", "1")
FIFTY = (*EVERY_STEP, "--steps", "50")
TWENTY = (*EVERY_STEP, "--steps", "20")
SAVING = ("--checkpoint-every", "10")


@dataclass(frozen=True)
class Jobs:
    """Runs of one world, by name of the run folder; a later one may go on in the folder of another."""

    root: Path
    size: int

    def run(self, jobs: list[tuple[str, str, tuple[str, ...]]]) -> None:
        listed = []
        for folder, trainer, flags in jobs:
            (self.root / folder).mkdir(exist_ok=True)
            where = {"folder": str(self.root / folder), "port": str(free_port())}
            listed.append({**where, "trainer": trainer, "flags": flags})
        plan = self.root / "jobs.json"
        plan.write_text(json.dumps(listed), encoding="utf-8")
        env = {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "MASTER_ADDR": "127.0.0.1"}
        ranks = [start_rank(rank, self.size, ["several", str(plan)], env, self.root) for rank in range(self.size)]
        said = [rank.communicate(timeout=280) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * self.size, said

    def curve(self, folder: str) -> list[object]:
        return Outcome([], [], [], self.root / folder).losses()

    def summary(self, folder: str) -> RunSummary:
        return RunSummary.read(self.root / folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("one"), 1)
    runs = [(name, name, (*LM, *FIFTY, "--batch-size", "16")) for name in TRAINERS]
    jobs.run([*runs, ("mnist", "ddp", (*MNIST, *FIFTY, "--batch-size", "16"))])
    return jobs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("two"), 2)
    runs: list[tuple[str, str, tuple[str, ...]]] = []
    for name in TRAINERS:
        runs += [
            (f"{name} lm", name, (*LM, *FIFTY, "--batch-size", "8")),
            (f"{name} mnist", name, (*MNIST, *FIFTY, "--batch-size", "8")),
            (f"{name} accumulated", name, (*LM, *TWENTY, "--batch-size", "2", "--accumulate", "4")),
            (f"{name} bf16", name, (*LM, *TWENTY, "--batch-size", "8", "--precision", "bf16")),
            (f"{name} taken up", "ddp", (*LM, *EVERY_STEP, *SAVING, "--batch-size", "8", "--steps", "10")),
            (f"{name} taken up", name, (*LM, *EVERY_STEP, *SAVING, "--batch-size", "8", "--steps", "20")),
            (f"{name} taken up", "ddp", (*LM, *EVERY_STEP, *SAVING, "--batch-size", "8", "--steps", "30")),
        ]
    lightning = (*LM, *EVERY_STEP, *SAVING, "--batch-size", "8", "--steps")
    runs += [
        ("lightning ddp", "lightning", (*LM, *FIFTY, "--batch-size", "8")),
        ("lightning fsdp", "lightning", (*LM, *FIFTY, "--batch-size", "8", "--strategy", "fsdp")),
        ("lightning accumulated", "lightning", (*LM, *TWENTY, "--batch-size", "2", "--accumulate", "4")),
        ("lightning bf16", "lightning", (*LM, *TWENTY, "--batch-size", "8", "--precision", "bf16")),
        ("lightning taken up", "ddp", (*lightning, "10")),
        ("lightning taken up", "lightning", (*lightning, "20")),
        ("lightning taken up", "ddp", (*lightning, "30")),
    ]
    jobs.run(runs)
    return jobs


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("four"), 4)
    jobs.run([(name, name, (*LM, *FIFTY, "--batch-size", "4")) for name in TRAINERS])
    return jobs


@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_rank_of_each_strategy_learns_as_ddp_does(trainer: str, one: Jobs) -> None:
    assert one.curve(trainer) == pytest.approx(one.curve("ddp"), rel=2e-4)
    assert one.summary(trainer).strategy == trainer


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_ranks_with_the_same_global_batch_learn_the_same(trainer: str, one: Jobs, two: Jobs) -> None:
    assert two.curve(f"{trainer} lm") == pytest.approx(one.curve("ddp"), rel=2e-4)
    assert two.curve(f"{trainer} mnist") == pytest.approx(one.curve("mnist"), rel=2e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lightning_learns_the_same(strategy: str, one: Jobs, two: Jobs) -> None:
    assert two.curve(f"lightning {strategy}") == pytest.approx(one.curve("ddp"), rel=2e-4)
    assert (two.summary(f"lightning {strategy}").trainer, two.summary(f"lightning {strategy}").strategy) == (
        "lightning",
        strategy,
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_four_ranks_with_the_same_global_batch_learn_the_same(trainer: str, one: Jobs, four: Jobs) -> None:
    assert four.curve(trainer) == pytest.approx(one.curve("ddp"), rel=2e-4)


@pytest.mark.parametrize("trainer", [*TRAINERS, "lightning"])
def test_accumulated_passes_give_the_step_of_one_large_pass(trainer: str, one: Jobs, two: Jobs) -> None:
    assert two.curve(f"{trainer} accumulated") == pytest.approx(one.curve("ddp")[:20], rel=2e-4)


@pytest.mark.parametrize("trainer", [*TRAINERS, "lightning"])
def test_bf16_stays_close_to_fp32_and_is_not_fp32(trainer: str, one: Jobs, two: Jobs) -> None:
    assert two.curve(f"{trainer} bf16") == pytest.approx(one.curve("ddp")[:20], rel=3e-2)
    assert two.curve(f"{trainer} bf16") != pytest.approx(one.curve("ddp")[:20], rel=1e-6)


@pytest.mark.parametrize("trainer", [*TRAINERS, "lightning"])
def test_a_run_may_change_its_strategy_at_a_checkpoint_and_back(trainer: str, one: Jobs, two: Jobs) -> None:
    assert two.summary(f"{trainer} taken up").resumed_from_step == 20
    assert two.curve(f"{trainer} taken up") == pytest.approx(one.curve("ddp")[:30], rel=2e-4)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_strategy_evaluates_the_whole_held_out_part_once(trainer: str, one: Jobs, two: Jobs) -> None:
    mine, reference = two.summary(f"{trainer} mnist").evaluation, one.summary("mnist").evaluation
    assert mine is not None
    assert reference is not None
    assert mine.predictions == 1000
    assert mine.loss == pytest.approx(reference.loss, rel=5e-3)


def test_the_hand_made_buckets_move_as_many_bytes_as_torchs(two: Jobs) -> None:
    assert two.summary("ddp_scratch lm").bytes_moved_per_step == two.summary("ddp lm").bytes_moved_per_step
