"""Ports for ranks that meet some time after a test has chosen the port."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from hpcjobs.ports import is_free

FIRST, LAST = 20_000, 32_767
"""Linux gives ports from 32768 on to connections: one of those could be taken before a rank listens at it."""


def _numbers() -> Iterator[int]:
    start = random.randrange(LAST - FIRST)
    return (FIRST + (start + number) % (LAST + 1 - FIRST) for number in count())


_ports = _numbers()


def free_port() -> int:
    """Another port at each call."""
    return next(filter(is_free, _ports))
