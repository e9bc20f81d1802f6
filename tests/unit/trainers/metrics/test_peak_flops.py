"""The stated peak of a device, by the name that torch gives it."""

from __future__ import annotations

import pytest

from hpcjobs.trainers.metrics.peak_flops import peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", True, 494.7),
        ("NVIDIA H100 80GB HBM3", "fp32", False, 66.9),
        ("NVIDIA H100 PCIe", "bf16", False, 756.0),
        ("NVIDIA H200", "bf16", False, 989.4),
        ("NVIDIA A100-SXM4-40GB", "fp16", False, 312.0),
        ("NVIDIA A10G", "bf16", False, 70.0),
        ("Tesla T4", "fp32", True, 8.1),
    ],
)
def test_the_peak_is_that_of_the_device_and_of_the_precision(
    name: str, precision: str, tf32: bool, tflops: float
) -> None:
    assert peak_flops_per_s(name, precision, tf32=tf32) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["AMD EPYC 9654", "NVIDIA L40S", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4070"])
def test_no_peak_is_claimed_for_a_device_without_a_stated_one(name: str) -> None:
    assert peak_flops_per_s(name, "bf16", tf32=False) is None


def test_no_peak_is_claimed_for_a_precision_that_the_device_lacks() -> None:
    assert peak_flops_per_s("Tesla T4", "bf16", tf32=False) is None
