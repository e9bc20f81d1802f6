"""Looks up the peak rate of a device's matrix units as its vendor states it: dense, in FLOP/s.

Figures that a maker states "with sparsity" are halved here. docs/metrics.md has the sources by device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MIG_SLICES = 7
"""Compute slices of a device that MIG divides (A100, H100, H200, GH200, B200); `MIG 3g.20gb` is three of them."""
MULTIPROCESSORS = ((r"A100", 108), (r"H100 PCIe", 114), (r"H100|H200|GH200", 132), (r"B200", 148))
"""Of complete devices. Slices have fewer than their share: seven of an A100 have 98."""


class Peak(NamedTuple):
    """TFLOP/s of products of this type, summed in fp32; None: the device has no units for them."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


# By a pattern of the name that torch gives, the first that fits: other models of a family have other figures.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200", Peak(2500.0, 2500.0, 1250.0, 80.0)),
    (r"B200", Peak(2250.0, 2250.0, 1100.0, 75.0)),
    (r"GH200", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"H200 NVL", Peak(835.5, 835.5, 417.5, 60.0)),
    (r"H200", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"H100 PCIe", Peak(756.0, 756.0, 378.0, 51.0)),
    (r"H100 NVL", Peak(835.5, 835.5, 417.5, 60.0)),
    (r"H100", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"A100", Peak(312.0, 312.0, 156.0, 19.5)),
    (r"A10G", Peak(70.0, 70.0, 35.0, 35.0)),
    (r"A10", Peak(125.0, 125.0, 62.5, 31.2)),
    (r"L40S", Peak(362.05, 362.05, 183.0, 91.6)),
    (r"L4", Peak(121.0, 121.0, 60.0, 30.3)),
    (r"RTX 4090(?! (?:D|Laptop))", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"RTX 4070(?! (?:Ti|SUPER|Laptop))", Peak(58.3, 58.3, 29.1, 29.1)),
    (r"V100-SXM2", Peak(125.0, None, None, 15.7)),
    (r"V100-PCIE", Peak(112.0, None, None, 14.0)),
    (r"T4", Peak(65.0, None, None, 8.1)),
    (r"MI300X", Peak(1307.4, 1307.4, 653.7, 163.4)),
    (r"MI250X", Peak(191.5, 191.5, None, 47.85)),  # of one die of two: torch sees each die as a device
)


def peak_flops_per_s(
    device_name: str, precision: str, *, tf32: bool, multiprocessors: int | None = None
) -> float | None:
    """The peak of one device or MIG slice, in the precision its matrix products run in; None where none is stated.

    Args:
        multiprocessors: visible to the process; their number gives the share of a MIG slice.
    """
    for pattern, peak in PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name):
            stated = _of_precision(peak, precision, tf32=tf32)
            return None if stated is None else stated * _share(device_name, multiprocessors) * 1e12
    return None


def _of_precision(peak: Peak, precision: str, *, tf32: bool) -> float | None:
    if precision == "fp16":
        return peak.fp16
    if precision == "bf16":
        return peak.bf16
    return (peak.tf32 if tf32 else None) or peak.fp32


def _share(device_name: str, multiprocessors: int | None) -> float:
    slices = re.search(r"\bMIG (?:\d+c\.)?(\d+)g\.", device_name)
    if slices is None:
        return 1.0
    complete = next((count for name, count in MULTIPROCESSORS if re.search(rf"\b(?:{name})\b", device_name)), None)
    if multiprocessors is None or complete is None:
        return int(slices[1]) / MIG_SLICES
    return multiprocessors / complete
