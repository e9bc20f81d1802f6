"""Expands Slurm's host lists without scontrol, which containers lack."""

from __future__ import annotations

import re

HOST_PART = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)")
"""A part of a host list, between commas outside brackets."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_LONGEST_RANGE = 64 * 1024
"""Slurm's own limit (MAX_RANGE of its hostlist.c)."""


def hosts_of(nodelist: str) -> list[str]:
    """``tu[01-03,7],x1`` -> ``tu01 tu02 tu03 tu7 x1``; numbers keep their zeros."""
    return [host for part in HOST_PART.findall(nodelist) for host in _expand(part)]


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    return [f"{before}{number}{tail}" for number in _numbers(inside) for tail in _expand(after)]


def _numbers(inside: str) -> list[str]:
    numbers = []
    for piece in inside.split(","):
        match = _RANGE.match(piece)
        if match is None:
            raise ValueError(f"{piece!r} in a host list is no number and no range")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _LONGEST_RANGE:
            raise ValueError(f"{piece!r} in a host list is a range of more than {_LONGEST_RANGE} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
