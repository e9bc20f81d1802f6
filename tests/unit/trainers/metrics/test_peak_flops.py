"""The stated peak of a device, by the name that torch gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.record.summary import RunSummary, Throughput
from hpcjobs.trainers.loop import describe_result
from hpcjobs.trainers.metrics import PEAKS, peak_flops_per_s

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("name", "fp16", "bf16", "tf32", "fp32"),
    [
        ("NVIDIA GB200", 2500.0, 2500.0, 1250.0, 80.0),
        ("NVIDIA B200", 2250.0, 2250.0, 1100.0, 75.0),
        ("NVIDIA GH200 480GB", 989.4, 989.4, 494.7, 66.9),
        ("NVIDIA H200", 989.4, 989.4, 494.7, 66.9),
        ("NVIDIA H200 NVL", 835.5, 835.5, 417.5, 60.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 494.7, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 756.0, 378.0, 51.0),
        ("NVIDIA H100 NVL", 835.5, 835.5, 417.5, 60.0),
        ("NVIDIA A100-SXM4-40GB", 312.0, 312.0, 156.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 312.0, 156.0, 19.5),
        ("NVIDIA A10G", 70.0, 70.0, 35.0, 35.0),
        ("NVIDIA A10", 125.0, 125.0, 62.5, 31.2),
        ("NVIDIA L40S", 362.05, 362.05, 183.0, 91.6),
        ("NVIDIA L4", 121.0, 121.0, 60.0, 30.3),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6),
        ("NVIDIA GeForce RTX 4070", 58.3, 58.3, 29.1, 29.1),
        ("Tesla V100-SXM2-16GB", 125.0, None, 15.7, 15.7),
        ("Tesla V100-PCIE-32GB", 112.0, None, 14.0, 14.0),
        ("Tesla T4", 65.0, None, 8.1, 8.1),
        ("AMD Instinct MI300X", 1307.4, 1307.4, 653.7, 163.4),
        ("AMD Instinct MI250X", 191.5, 191.5, 47.85, 47.85),
    ],
)
def test_the_peak_is_that_of_the_device_and_of_the_precision(
    name: str, fp16: float, bf16: float | None, tf32: float, fp32: float
) -> None:
    figures = [
        peak_flops_per_s(name, precision, tf32=use_tf32)
        for precision, use_tf32 in (("fp16", False), ("bf16", False), ("fp32", True), ("fp32", False))
    ]
    assert figures == [None if one is None else pytest.approx(one * 1e12) for one in (fp16, bf16, tf32, fp32)]


@pytest.mark.parametrize(
    ("name", "slices"),
    [("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 3), ("NVIDIA A100 MIG 7g.80gb", 7)],
)
def test_a_mig_slice_has_its_share_of_the_device(name: str, slices: int) -> None:
    assert peak_flops_per_s(name, "bf16", tf32=False) == pytest.approx(312e12 * slices / 7)


@pytest.mark.parametrize(
    "name",
    [
        "AMD EPYC 9654",
        "NVIDIA L40",
        "NVIDIA T400 4GB",
        "NVIDIA A1000",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_no_peak_is_claimed_for_a_device_without_a_stated_one(name: str) -> None:
    assert peak_flops_per_s(name, "bf16", tf32=False) is None


def test_the_documentation_has_the_figures_and_a_source_for_every_device() -> None:
    rows = [line.split("|")[1:-1] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in row] for row in rows if len(row) == 6]
    for pattern, peak in PEAKS:
        name = pattern.partition("(?!")[0].replace("-SXM2", " SXM2").replace("-PCIE", " PCIe")
        (row,) = [row for row in table if name in row[0].split(", ")]
        assert row[1:5] == ["" if figure is None else f"{figure:g}" for figure in peak], name
        assert row[5]


@pytest.mark.parametrize(
    ("device", "arguments"),
    [("cuda", "no MFU: no peak is stated for NVIDIA L40 in bf16"), ("cpu", "img/s on 1 ranks;")],
)
def test_a_run_on_a_gpu_without_a_stated_peak_says_so(device: str, arguments: str) -> None:
    summary = RunSummary(
        trainer="ddp",
        strategy="ddp",
        workload="resnet50",
        status="completed",
        exit_code=0,
        world_size=1,
        device=device,
        device_name="NVIDIA L40",
        precision="bf16",
        steps=3,
        elapsed_s=1.0,
        throughput=Throughput(5.0, "img/s"),
    )
    assert arguments in describe_result(summary, Path("run"))


@pytest.mark.parametrize(
    ("name", "multiprocessors", "of_device"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, 108),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 98, 108),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 132),
        ("NVIDIA H100 PCIe MIG 1g.10gb", 16, 114),
    ],
)
def test_a_slice_of_mig_counts_by_its_multiprocessors_of_those_of_the_device(
    name: str, multiprocessors: int, of_device: int
) -> None:
    """Seven slices of an A100 are 98 of its 108."""
    complete = peak_flops_per_s(name.partition(" MIG")[0], "bf16", tf32=False)
    slice_ = peak_flops_per_s(name, "bf16", tf32=False, multiprocessors=multiprocessors)
    assert complete is not None
    assert slice_ == pytest.approx(complete * multiprocessors / of_device)
