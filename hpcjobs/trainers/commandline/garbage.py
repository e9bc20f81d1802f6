"""Python's garbage collector in a trainer: off while it loads, and never run over what was loaded.

Loading torch makes 300,000 objects and no garbage. One rank that trains one step needs 0.86 of the CPU time of a
script by hand, and 1.15 of it with the collector left on (`benchmarks/trainer_start.py`).
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """No collection inside until `collect_new_objects`, and none over all objects as the process ends."""
    was_on = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_new_objects() -> None:
    """Turn the collector on for what is made from now on."""
    gc.freeze()
    gc.enable()
