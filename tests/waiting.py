"""Waiting for what a test has set going."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], *, what: str = "it", timeout_s: float = 240) -> None:
    """Return once ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} has not come to pass within {timeout_s:g} s"
        time.sleep(0.05)
