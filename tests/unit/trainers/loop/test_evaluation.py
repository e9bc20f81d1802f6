"""When and how the held-out part is evaluated, and which checkpoint is the best."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.record import METRICS
from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime.exits import ExitCode

from ..fsdp_here import strategies

HERE = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def train(folder: Path, *flags: str, trainer: str = "ddp") -> list[dict[str, Any]]:
    """The lines of metrics of a run of one rank."""
    assert trainers.run(trainer, [*flags, "--log-every", "1", "--run-dir", str(folder)]) == 0
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def seen() -> dict[str, list[object]]:
    """What the workload `worlds:watched` saw, in its own module."""
    result: dict[str, list[object]] = sys.modules["worlds"].SEEN
    return result


@pytest.mark.parametrize(
    ("flags", "steps", "predictions"),
    [
        ((), [8, 16, 20], 40),
        (("--eval-every", "5", "--eval-batches", "2"), [5, 10, 15, 20], 16),
        (("--eval-every", "0"), [], None),
    ],
)
def test_evaluations_are_as_often_and_as_long_as_asked(
    tmp_path: Path, flags: tuple[str, ...], steps: list[int], predictions: int | None
) -> None:
    lines = train(tmp_path, "--workload", "worlds:watched", "--steps", "20", *flags)
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == steps
    evaluation = RunSummary.read(tmp_path).evaluation
    assert (None if evaluation is None else evaluation.predictions) == predictions


def test_evaluation_has_the_precision_and_the_workers_of_training_and_the_workers_live_on(tmp_path: Path) -> None:
    train(tmp_path, "--workload", "worlds:watched", "--epochs", "3", "--precision", "bf16", "--workers", "1")
    assert all(seen()["held out autocast"])
    assert len(set(seen()["train pid"])) == 1
    assert len(set(seen()["held out pid"])) == 1
    assert len({*seen()["train pid"], *seen()["held out pid"]}) == 2


def test_the_best_checkpoint_is_the_one_whose_own_evaluation_was_best_the_last_included(tmp_path: Path) -> None:
    train(
        tmp_path, "--workload", "worlds:scored", "--epochs", "4", "--save-every-epochs", "1", "--checkpoint-keep", "9"
    )
    folder = tmp_path / "checkpoints"
    losses = [json.loads(path.read_text())["loss"] for path in sorted(folder.glob("step-*/manifest.json"))]
    assert losses == [3.0, 1.0, 2.0, 0.5]
    assert (folder / "best").resolve().name == (folder / "latest").resolve().name == "step-00000032"


def test_a_held_out_loss_that_is_no_number_is_never_the_best_and_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No loss is smaller than NaN: the first checkpoint remained the best for ever, also after a resume."""
    flags = ("--workload", "worlds:scored_nan", "--save-every-epochs", "1")
    best = tmp_path / "checkpoints" / "best"
    once = [*flags, "--epochs", "1", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", once) == ExitCode.LOSS_NOT_FINITE
    assert "held-out part is nan after the last step, 8" in capsys.readouterr().err
    assert not best.exists()
    train(tmp_path, *flags, "--resume", "none", "--epochs", "4")
    assert best.resolve().name == "step-00000032"


def test_a_checkpoint_that_was_saved_before_its_evaluation_may_be_the_best_once_it_is_evaluated(tmp_path: Path) -> None:
    """As after a stop during the last evaluation: the next attempt has nothing to do but that."""
    flags = ("--workload", "worlds:scored", "--save-every-epochs", "1", "--epochs", "1")
    train(tmp_path, *flags, "--eval-every", "0")
    train(tmp_path, *flags)
    best = tmp_path / "checkpoints" / "best"
    assert best.resolve().name == "step-00000008"
    assert json.loads((best / "manifest.json").read_text())["loss"] == 3.0


def test_a_checkpoint_between_evaluations_is_not_called_the_best_for_an_older_ones_loss(tmp_path: Path) -> None:
    train(tmp_path, "--workload", "worlds:scored", "--epochs", "2", "--checkpoint-every", "11")
    losses = {
        path.parent.name: json.loads(path.read_text())["loss"] for path in tmp_path.glob("checkpoints/step-*/*.json")
    }
    assert losses == {"step-00000011": None, "step-00000016": 1.0}


def test_a_run_that_goes_on_from_the_end_of_an_epoch_has_that_evaluation_once(tmp_path: Path) -> None:
    flags = ("--workload", "worlds:noisy_points", "--save-every-epochs", "1")
    before = train(tmp_path, *flags, "--epochs", "2")
    after = train(tmp_path, *flags, "--epochs", "3")
    evaluations = [{**line, "time_s": 0} for line in after if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [8, 16, 24]
    assert evaluations[1] == next(
        {**line, "time_s": 0} for line in before if line.get("step") == 16 and "accuracy" in line
    )


@pytest.mark.parametrize("trainer", strategies(["ddp", "ddp_scratch", "fsdp", "fsdp_scratch"]))
def test_the_loss_is_computed_in_fp32_whatever_the_precision(
    tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []
    cross_entropy = torch.nn.functional.cross_entropy

    def recorded(logits: torch.Tensor, *more: Any, **settings: Any) -> torch.Tensor:
        dtypes.append(logits.dtype)
        return cross_entropy(logits, *more, **settings)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", recorded)
    lm = ("--workload", "lm", "--sequence-length", "8", "--train-samples", "32", "--precision", "bf16", "--steps", "2")
    train(tmp_path, *lm, trainer=trainer)
    assert set(dtypes) == {torch.float32}
