"""The workloads that are measures: what they count, and that they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.record.summary import RunSummary
from hpcjobs.trainers.workloads.resnet50 import ResNet50, flops_per_image, open_images

from ..conftest import Runs
from ..fsdp_here import runnable

RESNET = ("--workload", "resnet50", "--image-size", "32", "--train-samples", "16", "--batch-size", "8", "--no-probe")


def test_resnet50_has_the_published_weights_and_multiply_adds() -> None:
    model = ResNet50(1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert flops_per_image(224, 1000) / 6 == pytest.approx(4.09e9, rel=2e-3)


def test_resnet50s_flops_are_those_of_its_layers() -> None:
    counted = 0.0
    model = ResNet50(10)

    def count(layer: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal counted
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        places = output.shape[2] * output.shape[3] if output.dim() == 4 else 1
        counted += 6.0 * places * weight.numel()

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(count)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 72, 72, dtype=torch.uint8))
    assert flops_per_image(72, 10) == counted


def test_every_strategy_trains_resnet50_alike_in_either_layout(tmp_path: Path) -> None:
    trainers_ = runnable(("ddp", "ddp_scratch", "fsdp", "fsdp_scratch"))
    flags = (*RESNET, "--steps", "2", "--log-every", "1")
    runs = Runs(tmp_path, 1)
    runs.run(
        ("reference", "ddp", (*flags, "--no-channels-last")), *((trainer, trainer, flags) for trainer in trainers_)
    )
    for trainer in trainers_:
        assert runs[trainer].losses() == pytest.approx(runs["reference"].losses(), rel=1e-3)
    throughput = runs["reference"].summary.throughput
    assert throughput is not None
    assert throughput.unit == "images/s"


def test_an_image_folder_is_read_by_class_and_cut_to_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 3), ("val", 1)):
        for label, colour in (("blau", (0, 0, 255)), ("rouge", (255, 0, 0))):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (50 + number, 40), colour).save(tmp_path / part / label / f"{number}.png")
    train, held_out, classes = open_images(tmp_path, side=32, channels_last=True, augment=False)
    assert (len(train), len(held_out), classes) == (6, 2, 2)
    pictures, labels = train.read_batch([0, 5])
    assert (pictures.shape, pictures.dtype) == ((2, 3, 32, 32), torch.uint8)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0, 1]
    assert pictures[0, :, 16, 16].tolist() == [0, 0, 255]


def test_data_without_classes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    flags = ["--data", str(tmp_path / "empty"), "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", [*RESNET, *flags]) == 14
    assert "no folder per class. Hint: train/CLASS" in capsys.readouterr().err


def test_matmul_reports_the_rate_of_its_products(tmp_path: Path) -> None:
    flags = ["--workload", "matmul", "--matrix-size", "64", "--steps", "4", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", flags) == 0
    summary = RunSummary.read(tmp_path)
    assert summary.throughput is not None
    assert summary.flops_per_s is not None
    assert summary.throughput.unit == "GFLOP/s"
    assert summary.throughput.value * 1e9 == pytest.approx(summary.flops_per_s)
    assert summary.mfu is None
