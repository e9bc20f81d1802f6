"""Every strategy, at every world size, gives the loss curve of one process alone.

Weights, samples and their order are the same, so only the order of additions differs: fp32 curves agree to 2e-4
relative for lm and 2e-3 for mnist, and with bf16 compute to 3e-2. Curves of 50 steps are compared on a cluster.
"""

from __future__ import annotations

import pytest

from ..conftest import Runs
from ..fsdp_here import runnable, strategies

TRAINERS = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch")
LIGHTNING = {"lightning ddp": (), "lightning fsdp": ("--strategy", "fsdp")}
LM = ("--workload", "lm", "--preset", "tiny", "--sequence-length", "32", "--train-samples", "1024")
MNIST = ("--workload", "mnist")
EVERY_STEP = ("--log-every", "1", "--clip-norm", "1", "--no-probe")
STEPS, FEWER, FEW = 20, 10, 5
ONE, TWO, FOUR = (("--batch-size", size) for size in ("16", "8", "4"))
IN_PARTS = ("--batch-size", "2", "--accumulate", "4")
CHAIN = runnable(("ddp", "ddp_scratch", "fsdp", "fsdp_scratch", "lightning", "ddp"))


def steps(count: int) -> tuple[str, ...]:
    return (*EVERY_STEP, "--steps", str(count))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("one"), 1)
    runs.run(
        *((name, name, (*LM, *ONE, *steps(STEPS))) for name in runnable(TRAINERS)),
        ("longer", "ddp", (*LM, *ONE, *steps(FEW * len(CHAIN)))),
        ("mnist", "ddp", (*MNIST, *ONE, *steps(STEPS))),
    )
    return runs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("two"), 2)
    kinds: list[tuple[str, str, tuple[str, ...]]] = []
    for name in runnable((*TRAINERS, *LIGHTNING)):
        trainer, flags = name.split()[0], LIGHTNING.get(name, ())
        kinds += [
            (f"{name} lm", trainer, (*flags, *LM, *TWO, *steps(STEPS))),
            (f"{name} accumulated", trainer, (*flags, *LM, *IN_PARTS, *steps(FEWER))),
            (f"{name} bf16", trainer, (*flags, *LM, *TWO, *steps(FEW), "--precision", "bf16")),
        ]
    kinds += [(f"{name} mnist", name, (*MNIST, *TWO, *steps(STEPS))) for name in runnable(TRAINERS)]
    for number, name in enumerate(CHAIN):
        saving = ("--checkpoint-every", str(FEW), "--checkpoint-keep", "9")
        kinds += [("chain", name, (*LM, *TWO, *saving, *steps(FEW * (number + 1))))]
    runs.run(*kinds)
    return runs


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("four"), 4)
    runs.run(*((name, name, (*LM, *FOUR, *steps(STEPS))) for name in runnable(TRAINERS)))
    return runs


@pytest.mark.parametrize("trainer", strategies(TRAINERS))
def test_one_rank_of_each_strategy_learns_as_ddp_does(trainer: str, one: Runs) -> None:
    assert one[trainer].losses() == pytest.approx(one["ddp"].losses(), rel=2e-4)
    assert len(one[trainer].losses()) == STEPS
    assert one[trainer].summary.strategy == trainer


@pytest.mark.parametrize("trainer", strategies(TRAINERS))
def test_two_ranks_with_the_same_global_batch_learn_the_same(trainer: str, one: Runs, two: Runs) -> None:
    assert two[f"{trainer} lm"].losses() == pytest.approx(one["ddp"].losses(), rel=2e-4)
    assert two[f"{trainer} mnist"].losses() == pytest.approx(one["mnist"].losses(), rel=2e-3)


@pytest.mark.parametrize("strategy", strategies(["ddp", "fsdp"]))
def test_lightning_learns_the_same(strategy: str, one: Runs, two: Runs) -> None:
    ended = two[f"lightning {strategy} lm"]
    assert ended.losses() == pytest.approx(one["ddp"].losses(), rel=2e-4)
    assert (ended.summary.trainer, ended.summary.strategy) == ("lightning", strategy)


@pytest.mark.parametrize("trainer", strategies(TRAINERS))
def test_four_ranks_with_the_same_global_batch_learn_the_same(trainer: str, one: Runs, four: Runs) -> None:
    assert four[trainer].losses() == pytest.approx(one["ddp"].losses(), rel=2e-4)


@pytest.mark.parametrize("name", strategies([*TRAINERS, *LIGHTNING]))
def test_accumulated_passes_give_the_step_of_one_large_pass(name: str, one: Runs, two: Runs) -> None:
    assert two[f"{name} accumulated"].losses() == pytest.approx(one["ddp"].losses()[:FEWER], rel=2e-4)


@pytest.mark.parametrize("name", strategies([*TRAINERS, *LIGHTNING]))
def test_bf16_stays_close_to_fp32_and_is_not_fp32(name: str, one: Runs, two: Runs) -> None:
    assert two[f"{name} bf16"].losses() == pytest.approx(one["ddp"].losses()[:FEW], rel=3e-2)
    assert two[f"{name} bf16"].losses() != pytest.approx(one["ddp"].losses()[:FEW], rel=1e-6)


def test_a_run_may_change_its_strategy_at_every_checkpoint(one: Runs, two: Runs) -> None:
    assert two["chain"].summary.resumed_from_step == FEW * (len(CHAIN) - 1)
    assert two["chain"].losses() == pytest.approx(one["longer"].losses(), rel=2e-4)


@pytest.mark.parametrize("trainer", strategies(TRAINERS))
def test_every_strategy_evaluates_the_whole_held_out_part_once(trainer: str, one: Runs, two: Runs) -> None:
    mine, reference = two[f"{trainer} mnist"].summary.evaluation, one["mnist"].summary.evaluation
    assert mine is not None
    assert reference is not None
    assert mine.predictions == 1000
    assert mine.loss == pytest.approx(reference.loss, rel=5e-3)


def test_the_hand_made_buckets_move_as_many_bytes_as_torchs(two: Runs) -> None:
    assert two["ddp_scratch lm"].summary.bytes_moved_per_step == two["ddp lm"].summary.bytes_moved_per_step
