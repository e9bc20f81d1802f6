"""What needs fsdp on CPUs is skipped with a torch that has fully_shard for GPUs alone, as the lowest one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(not HAS_FSDP, reason=f"torch {torch.__version__} has fully_shard for GPUs alone")


def uses_fsdp(name: str) -> bool:
    """Whether the strategy of this name in the tests is torch's: fsdp, lightning fsdp."""
    return name.split()[-1] == "fsdp"


def runnable(names: Iterable[str]) -> tuple[str, ...]:
    """The strategies that this torch can run here, for worlds that several tests share."""
    return tuple(name for name in names if HAS_FSDP or not uses_fsdp(name))


def strategies(names: Iterable[str]) -> list[Any]:
    """All strategies as parameters of a test, those that cannot run skipped."""
    return [pytest.param(name, marks=needs_fsdp) if uses_fsdp(name) else name for name in names]
