"""What a resumed run takes from its checkpoint, and what from its flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.record.summary import RunSummary

from ..fsdp_here import needs_fsdp

FLAGS = ("--log-every", "1", "--checkpoint-every", "5", "--no-probe")
POINTS = (*FLAGS, "--workload", "foreign:tied")
PARTLY = (*FLAGS, "--workload", "worlds:partly")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path))
    return tmp_path


def read_state(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run_dir / "checkpoints/latest/state.pt")
    return state


def read_losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("trainer", ["ddp", "fsdp_scratch"])
def test_the_flags_of_the_optimizer_count_in_a_resumed_run_too(trainer: str, run_dir: Path) -> None:
    assert trainers.run("ddp", [*POINTS, "--steps", "5", "--weight-decay", "0.3"]) == 0
    changed = ("--weight-decay", "0.1", "--betas", "0.8", "0.9", "--eps", "1e-6")
    assert trainers.run(trainer, [*POINTS, "--steps", "10", *changed]) == 0
    (group,) = read_state(run_dir)["optimizer"]["param_groups"]
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert RunSummary.read(run_dir).resumed_from_step == 5


@needs_fsdp
def test_sgd_goes_on_from_ddp_under_fsdp_and_back(run_dir: Path) -> None:
    sgd = ("--optimizer", "sgd")
    assert trainers.run("ddp", [*POINTS, *sgd, "--steps", "5"]) == 0
    assert trainers.run("fsdp", [*POINTS, *sgd, "--steps", "10", "--momentum", "0.5"]) == 0
    assert trainers.run("ddp", [*POINTS, *sgd, "--steps", "15", "--momentum", "0.5"]) == 0
    assert RunSummary.read(run_dir).resumed_from_step == 10
    assert read_state(run_dir)["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_the_state_of_another_optimizer_is_refused_by_both_names(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainers.run("ddp", [*POINTS, "--steps", "5"]) == 0
    assert trainers.run("ddp", [*POINTS, "--steps", "10", "--optimizer", "sgd"]) == 2
    message = capsys.readouterr().err
    assert "the checkpoint has the state of the optimizer adamw, and this run has sgd. Hint: --init-from" in message


def test_moments_stay_where_a_unit_has_a_weight_that_was_never_used(run_dir: Path) -> None:
    """From ddp, whose unused weights have no state, to units whose weights are one vector."""
    ddp = ("--find-unused-parameters",)
    assert trainers.run("ddp", [*PARTLY, *ddp, "--steps", "10"]) == 0
    before = {n: v["exp_avg"] for n, v in read_state(run_dir)["optimizer"]["state"].items()}
    assert trainers.run("fsdp_scratch", [*PARTLY, "--steps", "11", "--lr", "1e-30", "--betas", "1e-9", "0.9"]) == 0
    after = {n: v for n, v in read_state(run_dir)["optimizer"]["state"].items() if n in before}
    assert all(float(values["step"]) == 11 for values in after.values())
    assert before.keys() == after.keys()


def test_ema_of_an_optimizer_without_state_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--optimizer", "sgd", "--momentum", "0", "--ema", "0.9")
    assert trainers.run("ddp", [*POINTS, *flags, "--steps", "5"]) == 2
    assert "--ema and --momentum 0: the average is kept in the optimizer's state" in capsys.readouterr().err


def test_numpy_and_python_draw_what_the_seed_says_and_go_on_with_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, steps: int, seed: int = 3) -> list[float]:
        folder = run_dir / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("HPCJOBS_RUN_DIR", str(folder))
        flags = (*FLAGS, "--workload", "worlds:drawing", "--seed", str(seed), "--steps", str(steps))
        assert trainers.run("ddp", list(flags)) == 0
        return read_losses(folder)

    alone = train("alone", 10)
    assert train("again", 10) == alone
    train("resumed", 5)
    assert train("resumed", 10) == alone
    assert train("other", 10, seed=4) != alone


def test_blocks_that_are_computed_again_count_a_batch_once_in_batch_norms(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for name, flags in (("plain", ()), ("again", ("--activation-checkpointing",))):
        monkeypatch.setenv("HPCJOBS_RUN_DIR", str(run_dir / name))
        (run_dir / name).mkdir()
        assert trainers.run("ddp", [*FLAGS, "--workload", "foreign:normed", "--steps", "5", *flags]) == 0
        states.append(read_state(run_dir / name)["model"])
    assert int(states[0]["layers.0.bn.num_batches_tracked"]) == 5
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_frozen_weights_count_for_less_operations(run_dir: Path) -> None:
    assert trainers.run("ddp", [*PARTLY, "--find-unused-parameters", "--steps", "5"]) == 0
    summary = RunSummary.read(run_dir)
    assert summary.flops_per_s is not None
    assert summary.throughput is not None
    per_point = summary.flops_per_s / summary.throughput.value
    assert 8 < per_point < 12, "12 for a model that is trained completely, two thirds of it for a frozen one"
