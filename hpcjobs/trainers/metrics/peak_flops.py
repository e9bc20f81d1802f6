"""The most that a device's matrix units can do, as its maker states it: dense, in FLOP/s.

Sources: NVIDIA's data sheets of H200, H100 (SXM, PCIe, NVL), A100, V100, L4 and T4, whose figures "with sparsity"
are halved here; for the A10G, which has no data sheet, the figures commonly stated for AWS's G5 instances.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """TFLOP/s; None: the device has no such units."""

    half: float | None  # bf16 or fp16, summed in fp32
    tf32: float | None
    fp32: float


# by word of the name that torch gives, the first that fits
PEAKS: tuple[tuple[str, Peak], ...] = (
    ("H200 NVL", Peak(835.5, 417.5, 60.0)),
    ("H200", Peak(989.4, 494.7, 66.9)),
    ("H100 PCIe", Peak(756.0, 378.0, 51.0)),
    ("H100 NVL", Peak(835.5, 417.5, 60.0)),
    ("H100", Peak(989.4, 494.7, 66.9)),
    ("A100", Peak(312.0, 156.0, 19.5)),
    ("A10G", Peak(70.0, 35.0, 35.0)),
    ("V100-SXM2", Peak(125.0, None, 15.7)),
    ("L4", Peak(121.0, 60.0, 30.3)),
    ("T4", Peak(65.0, None, 8.1)),
)
ONLY_FP16 = ("V100-SXM2", "T4")


def peak_flops_per_s(device_name: str, precision: str, *, tf32: bool) -> float | None:
    """Of one device, in the precision its matrix products run in; None where none is stated."""
    for name, peak in PEAKS:
        if re.search(rf"\b{name}\b", device_name):
            if precision == "bf16" and name in ONLY_FP16:
                return None
            stated = peak.half if precision != "fp32" else (peak.tf32 if tf32 else None) or peak.fp32
            return None if stated is None else stated * 1e12
    return None
