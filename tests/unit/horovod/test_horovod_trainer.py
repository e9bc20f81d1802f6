"""The horovod trainer: the loss curves of ddp, over Gloo and over MPI, and never as worlds of one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)

from conftest import Runs

from hpcjobs.runtime import checkpoints
from hpcjobs.trainers import checkpoint
from hpcjobs.trainers.checkpoint import export

LM = "--workload lm --sequence-length 32 --train-samples 1024 --log-every 1 --batch-size 8 --clip-norm 1"
ODD = "--workload lm --sequence-length 32 --train-samples 25 --epochs 2 --batch-size 4 --log-every 1"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("two"))
    ended = runs.go(
        2,
        ("ddp", "ddp", f"{LM} --steps 20"),
        ("gloo", "horovod", f"{LM} --steps 20"),
        ("accumulated", "horovod", f"{LM} --steps 20 --batch-size 2 --accumulate 4"),
        ("bf16", "horovod", f"{LM} --steps 20 --precision bf16"),
        ("fp16 gradients", "horovod", f"{LM} --steps 20 --compress fp16 --fusion-threshold-mb 0.25 --cycle-time-ms 2"),
        ("taken up", "ddp", f"{LM} --steps 10 --checkpoint-every 5"),
        ("taken up", "horovod", f"{LM} --steps 20 --checkpoint-every 5"),
        ("taken up", "ddp", f"{LM} --steps 22"),
        ("lightning", "lightning", f"{LM} --steps 20 --strategy horovod"),
        ("linear", "horovod", f"{LM} --steps 1 --lr 0.001 --lr-scaling linear"),
    )
    assert (ended.codes, ended.err) == ([0, 0], "")
    return runs


@pytest.fixture(scope="module")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("mpi"))
    ended = runs.go(
        2,
        ("mpi", "horovod", f"{LM} --steps 20"),
        ("adasum", "horovod", "--workload mnist --epochs 1 --batch-size 32 --adasum"),
        ("digits", "horovod", "--workload mnist --steps 20 --lr-scaling linear"),
        over="mpi",
    )
    assert (ended.codes, ended.err) == ([0], "")
    assert "Horovod: 2 ranks over Open MPI" in ended.out
    return runs


SIX = LM.replace("--log-every", "--steps 6 --log-every")
PICTURES = "--workload resnet50 --image-size 32 --batch-size 2 --train-samples 24 --log-every 1 --sync-batchnorm"
FLAGS = {
    "adafactor": "--optimizer adafactor",
    "average": "--ema 0.5",
    "schedule": "--lr-schedule wsd --no-decay-norms --gradient-norm --weight-decay 0.1",
    "recomputed": "--activation-checkpointing --log-to tensorboard --profile 2:4",
}


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each flag under both trainers; pictures begin under ddp, whose layout of weights is another one."""
    runs = Runs(tmp_path_factory.mktemp("flagged"))
    both = [
        (f"{name} {trainer}", trainer, f"{SIX} {flags}")
        for name, flags in FLAGS.items()
        for trainer in ("ddp", "horovod")
    ]
    pictures = [(f"pictures {trainer}", trainer, f"{PICTURES} --steps 3") for trainer in ("ddp", "horovod")]
    pictures.append(("pictures lightning", "lightning", f"{PICTURES} --steps 3 --strategy horovod"))
    resumed = [
        ("resumed", "ddp", f"{PICTURES} --steps 1 --checkpoint-every 1"),
        ("resumed", "horovod", f"{PICTURES} --steps 3"),
    ]
    compiled = ("compiled", "horovod", f"{SIX} --compile-blocks")
    ended = runs.go(2, *both, *pictures, *resumed, compiled, warnings="ignore")  # torch warns of itself as it compiles
    assert ended.codes == [0, 0], ended.err
    return runs


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_every_trainer_have_the_losses_of_ddp(name: str, flagged: Runs) -> None:
    assert flagged.losses(f"{name} horovod") == pytest.approx(flagged.losses(f"{name} ddp"), rel=2e-4)
    ours, others = flagged.summary(f"{name} horovod").evaluation, flagged.summary(f"{name} ddp").evaluation
    assert ours is not None
    assert others is not None
    assert ours.loss == pytest.approx(others.loss, rel=2e-4)


def test_traces_and_copies_of_metrics_are_written(flagged: Runs) -> None:
    folder = flagged.root / "recomputed horovod"
    assert len(list((folder / "profile").iterdir())) == 2
    assert list(folder.rglob("events.out.tfevents*"))


def test_compiled_blocks_have_the_losses_of_plain_ones(flagged: Runs, two: Runs) -> None:
    assert flagged.losses("compiled") == pytest.approx(flagged.losses("recomputed ddp"), rel=2e-4)


@pytest.mark.parametrize("name", ["pictures horovod", "pictures lightning", "resumed"])
def test_a_network_of_convolutions_has_the_losses_of_ddp_with_synchronised_batch_norms(
    name: str, flagged: Runs
) -> None:
    assert flagged.losses(name) == pytest.approx(flagged.losses("pictures ddp"), rel=1e-3)


@pytest.mark.parametrize("name", ["gloo", "accumulated", "lightning"])
def test_losses_are_those_of_ddp(name: str, two: Runs) -> None:
    assert two.losses(name) == pytest.approx(two.losses("ddp"), rel=2e-4)


def test_over_mpi_they_are_the_same_and_the_summary_says_what_carried_the_gradients(two: Runs, mpi: Runs) -> None:
    assert mpi.losses("mpi") == pytest.approx(two.losses("ddp"), rel=2e-4)
    assert (two.summary("gloo").backend, mpi.summary("mpi").backend) == ("horovod-gloo", "horovod-mpi")
    assert (two.summary("lightning").backend, two.summary("lightning").strategy) == ("horovod-gloo", "horovod")


@pytest.mark.parametrize("name", ["bf16", "fp16 gradients"])
def test_fewer_bits_stay_close_and_are_not_the_same(name: str, two: Runs) -> None:
    assert two.losses(name) == pytest.approx(two.losses("ddp"), rel=3e-2)
    assert two.losses(name) != two.losses("ddp")


def test_16_bit_gradients_are_half_the_bytes(two: Runs) -> None:
    plain, halved = two.summary("gloo").bytes_moved_per_step, two.summary("fp16 gradients").bytes_moved_per_step
    assert plain is not None
    assert halved == plain // 2


def test_a_checkpoint_of_ddp_goes_on_under_horovod_and_back(two: Runs) -> None:
    assert two.summary("taken up").resumed_from_step == 20
    assert two.losses("taken up")[:20] == pytest.approx(two.losses("ddp"), rel=2e-4)


def test_the_rate_times_the_ranks(two: Runs) -> None:
    assert two.summary("linear").lr == pytest.approx(0.002)


def test_exposed_communication_is_measured(two: Runs) -> None:
    assert two.summary("gloo").exposed_communication_s is not None


@pytest.mark.parametrize(("name", "least"), [("adasum", 0.8), ("digits", 0.5)])
def test_digits_are_learnt(name: str, least: float, mpi: Runs) -> None:
    """`digits` is the documented command of 20 steps, with the accuracy that the page promises."""
    evaluation = mpi.summary(name).evaluation
    assert evaluation is not None
    assert evaluation.accuracy > least


def test_uneven_ranks_join_and_train_on_each_sample_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """25 samples on 3 ranks in batches of 4: the first rank has a third batch, of the one sample left."""
    runs = Runs(tmp_path_factory.mktemp("three"))
    ended = runs.go(3, ("filled", "ddp", ODD), ("joined", "horovod", f"{ODD} --join"))
    assert (ended.codes, ended.err) == ([0, 0, 0], "")
    filled, combined = runs.losses("filled"), runs.losses("joined")
    assert combined[:2] == pytest.approx(filled[:2], rel=2e-4)
    assert combined[2] != pytest.approx(filled[2], rel=2e-4)  # two samples were not repeated
    assert combined[-1] < combined[0]
    assert len(combined) == len(filled) == 6


def test_what_cannot_work_is_refused_in_one_line_each(tmp_path_factory: pytest.TempPathFactory) -> None:
    refused = {
        "--controller mpi": "the launcher does not speak to Open MPI v",
        "--adasum": "--adasum works over MPI alone",
        "--adasum --join": "there is no --join with it",
        "--adasum --precision fp16": "--precision bf16",
        "--memory-snapshot": "--memory-snapshot is of a GPU's memory, and this run is on CPUs",
    }
    runs = Runs(tmp_path_factory.mktemp("refused"))
    ended = runs.go(2, *((f"run {flags}", "horovod", f"{LM} --steps 1 {flags}") for flags in refused))
    assert ended.codes == [10, 10]
    lines = ended.err.splitlines()
    assert len(lines) == len(refused)
    for output in refused.values():
        assert sum(output in line for line in lines) == 1


def test_a_loss_that_is_not_a_number_ends_all_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = Runs(tmp_path_factory.mktemp("lost"))
    ended = runs.go(2, ("run", "horovod", f"{LM} --steps 5 --lr 1e30"))
    assert ended.codes == [13, 13]
    assert "the loss is" in ended.err


def test_adapters_have_the_losses_of_ddp_and_are_all_that_is_trained(two: Runs, tmp_path: Path) -> None:
    weights, runs = tmp_path / "weights.safetensors", Runs(tmp_path / "runs")
    assert export.main([str(two.root / "taken up"), "--out", str(weights)]) == 0
    runs.root.mkdir()
    flags = f"{SIX} --init-from {weights} --lora 4 --lr 0.01 --checkpoint-every 6"
    ended = runs.go(2, ("ddp", "ddp", flags), ("horovod", "horovod", flags))
    assert (ended.codes, ended.err) == ([0, 0], "")
    assert runs.losses("horovod") == pytest.approx(runs.losses("ddp"), rel=1e-6)
    assert len(set(runs.losses("horovod"))) == 6
    for name in ("ddp", "horovod"):
        saved = checkpoint.read(checkpoints.steps(runs.root / name / "checkpoints")[0])[1]
        assert saved["model"]
        assert all("lora_" in tensor for tensor in saved["model"]), name
