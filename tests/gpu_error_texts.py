"""Errors of CUDA and NCCL with what they are, from tests/data/gpu_errors.txt."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COUNTERS = """\
    Retired Pages
        Single Bit ECC                    : 0
        Double Bit ECC                    : 0
        Pending Page Blacklist            : No
    Remapped Rows
        Uncorrectable Error               : 0
gpu 0: uncorrectable ECC errors: 0, uncorrectable NVLink error count=0, double-bit ECC errors N/A"""
"""Of nvidia-smi -q and of a health check, as jobs print them at their start: no error."""


class GpuErrorText(NamedTuple):
    effect: str
    cause: str | None
    """None: `hpcjobs why` calls it a consequence."""
    exception: str
    """Name of its class, without the module."""
    message: str
    text: str
    """As a traceback ends with it."""


def read_texts() -> list[GpuErrorText]:
    texts = []
    file = Path(__file__).parent / "data" / "gpu_errors.txt"
    for section in file.read_text(encoding="utf-8").split("\n=== ")[1:]:
        head, _, text = section.partition("\n")
        effect, cause = head.split()
        name, _, message = text.strip().partition(": ")
        known = None if cause == "-" else cause
        texts.append(GpuErrorText(effect.replace("-", " "), known, name.rpartition(".")[2], message, text.strip()))
    return texts
