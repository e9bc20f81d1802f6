"""Ports for ranks that meet some time after a test has chosen the port."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from hpcjobs.ports import is_free

FIRST, LAST = 10_500, 14_999
"""Below those that hpcjobs chooses by itself, and those that Linux gives to connections (from 32768 on), which could
be taken before a rank listens there."""


def _numbers() -> Iterator[int]:
    start = random.randrange(LAST - FIRST)
    return (FIRST + (start + number) % (LAST + 1 - FIRST) for number in count())


_ports = _numbers()


def free_port() -> int:
    """Another port at each call."""
    return next(filter(is_free, _ports))
