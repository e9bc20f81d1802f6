"""Looks up the NVIDIA driver that a version of CUDA needs.

Source: "CUDA Toolkit Release Notes", table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
Compatibility" (Linux x86_64): within a major version the driver of its first release is enough.
"""

from __future__ import annotations

_LEAST = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def least_driver(cuda: str) -> str | None:
    """``12.4`` -> ``525.60.13``; None: a version that is not known here."""
    major = cuda.split(".")[0]
    return _LEAST.get(int(major)) if major.isdigit() else None


def as_numbers(version: str) -> tuple[int, ...]:
    """``525.60.13`` -> (525, 60, 13), to compare by."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
