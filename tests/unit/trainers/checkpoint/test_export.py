"""Checkpoints of every strategy as safetensors files, and runs that begin with their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpcjobs.runtime.exits import BadData
from hpcjobs.trainers.checkpoint import export
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.weights import load_weights, write_weights
from hpcjobs.trainers.workloads import load_workload

from ..conftest import Runs
from ..fsdp_here import runnable

safetensors = pytest.importorskip("safetensors.torch")
LM = ("--workload", "lm", "--sequence-length", "16", "--train-samples", "256", "--batch-size", "4", "--no-probe")
NAMES = ("ddp", "fsdp", "fsdp_scratch")


def written(run_dir: Path, *flags: str) -> dict[str, torch.Tensor]:
    out = run_dir / "model.safetensors"
    assert export.main([str(run_dir), "--out", str(out), *flags]) == 0
    tensors: dict[str, torch.Tensor] = safetensors.load_file(out)
    return tensors


def test_the_weights_of_every_strategy_are_exported_alike_and_a_run_that_begins_with_them_has_their_loss(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path, 2)
    saving = (*LM, "--steps", "4", "--checkpoint-every", "4", "--ema", "0.5")
    runs.run(*((name, name, saving) for name in runnable(NAMES)))
    reference, average = written(tmp_path / "ddp"), written(tmp_path / "ddp", "--average")
    model = load_workload(Config(workload="lm", sequence_length=16)).build_model()
    assert set(reference) == set(model.state_dict())
    assert not torch.allclose(reference["token.weight"], average["token.weight"], atol=1e-6)
    assert torch.equal(average["token.weight"], average["head.weight"])  # tied
    for name in runnable(NAMES):
        for mine, theirs in ((written(tmp_path / name), reference), (written(tmp_path / name, "--average"), average)):
            for key, tensor in theirs.items():
                torch.testing.assert_close(mine[key], tensor, rtol=1e-3, atol=1e-5)
    halved = written(tmp_path / "ddp", "--dtype", "bf16")
    assert {tensor.dtype for tensor in halved.values()} == {torch.bfloat16}

    written(tmp_path / "ddp", "--average")
    warm = (*LM, "--steps", "1", "--lr", "1e-12", "--init-from", str(tmp_path / "ddp" / "model.safetensors"))
    runs.run(*((f"warm {name}", name, warm) for name in runnable(NAMES)))
    ended = runs["ddp"].summary.evaluation  # of the average
    assert ended is not None
    for name in runnable(NAMES):
        begun = runs[f"warm {name}"].summary.evaluation
        assert begun is not None
        assert begun.loss == pytest.approx(ended.loss, rel=1e-4)


def test_a_file_of_another_model_is_refused_by_the_tensors_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_weights(path, nn.Linear(2, 3).state_dict(), {})
    load_weights(nn.Linear(2, 3), path)
    with pytest.raises(BadData, match=r"bias has the shape \(3,\), and \(4,\) in the model"):
        load_weights(nn.Linear(2, 4), path)
    with pytest.raises(BadData, match="has, and the model has not, 1 tensors: bias"):
        load_weights(nn.Linear(2, 3, bias=False), path)
    with pytest.raises(BadData, match=r"lacks 2 tensors: 0\.bias, 0\.weight"):
        load_weights(nn.Sequential(nn.Linear(2, 3)), path)
    path.write_bytes(b"no tensors")
    with pytest.raises(BadData, match="can't be read"):
        load_weights(nn.Linear(2, 3), path)


@pytest.mark.parametrize("flags", [(), ("--average",)])
def test_a_folder_without_a_checkpoint_is_refused_and_no_file_is_left(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(tmp_path), "--out", str(tmp_path / "x"), *flags]) == 14
    assert "has no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
