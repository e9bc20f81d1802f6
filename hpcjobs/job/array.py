"""Job arrays in Slurm's spelling: ``0-9``, ``1,3,5-7``, ``0-100:10``, ``0-99%4``."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?\Z", re.ASCII)
_THROTTLE = re.compile(r"[1-9]\d*\Z", re.ASCII)


def array_indices(spec: str) -> list[int]:
    """The task indices of ``spec``, ascending; the throttle after ``%`` does not matter here.

    Raises:
        ValueError: not an array specification.
    """
    found: set[int] = set()
    parts, throttled, throttle = spec.partition("%")
    for part in parts.split(","):
        match = _PART.match(part)
        if match is None or int(match[2] or match[1]) < int(match[1]) or (throttled and not _THROTTLE.match(throttle)):
            raise ValueError(f"array {spec!r} is not understood; say 0-9, 1,3,5, 0-100:10 or 0-99%4")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)))
    return sorted(found)


def task_ids(job_id: str) -> list[str]:
    """The plain ids in one that Slurm prints: ``12_[3-5%2]`` (tasks still pending) -> ``12_3 12_4 12_5``."""
    parent, bracket, inside = job_id.partition("_[")
    if not bracket:
        return [job_id]
    return [f"{parent}_{index}" for index in array_indices(inside.rstrip("]"))]
