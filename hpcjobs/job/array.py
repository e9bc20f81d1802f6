"""Job arrays in Slurm's spelling: ``0-9``, ``1,3,5-7``, ``0-100:10``, ``0-99%4``."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_INDEX = 4_000_000
"""The largest index that Slurm can be configured to take (MaxArraySize is at most 4000001)."""
MAX_TASKS = 100_000
"""The most tasks of an array, and cells of a sweep, that hpcjobs submits: it keeps a record of each."""

_PART = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?\Z", re.ASCII)
_THROTTLE = re.compile(r"[1-9]\d*\Z", re.ASCII)
_DIGITS = 10
"""Most digits of an index; Python refuses to read thousands of them."""


def check_array(spec: str) -> None:
    """Check an array that is to be submitted, without expanding it.

    Raises:
        ValueError: not an array specification, or too large.
    """
    if (tasks := sum(map(len, _ranges(spec)))) > MAX_TASKS:
        raise ValueError(f"{tasks} tasks; hpcjobs submits arrays of up to {MAX_TASKS}")


def array_indices(spec: str) -> list[int]:
    """The task indices of ``spec``, ascending; the throttle after ``%`` does not matter here.

    Raises:
        ValueError: not an array specification, or an index above `MAX_INDEX`.
    """
    return sorted(set[int]().union(*_ranges(spec)))


def array_text(indices: Iterable[int]) -> str:
    """``[3, 4, 5, 9]`` -> ``3-5,9``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(str(n) for n in run) for run in runs)


def _ranges(spec: str) -> list[range]:
    parts, throttled, throttle = spec.partition("%")
    if throttled and not _THROTTLE.match(throttle):
        raise _not_understood(spec)
    return [_range(part, spec) for part in parts.split(",")]


def _range(part: str, spec: str) -> range:
    match = _PART.match(part)
    if match is None:
        raise _not_understood(spec)
    texts = (match[1], match[2] or match[1], match[3] or "1")
    if any(len(text.lstrip("0")) > _DIGITS for text in texts):
        raise _too_large(part)
    first, last, step = map(int, texts)
    if last < first:
        raise _not_understood(spec)
    if last > MAX_INDEX:
        raise _too_large(part)
    return range(first, last + 1, step)


def _not_understood(spec: str) -> ValueError:
    return ValueError(f"array {spec[:80]!r} is not understood; write 0-9, 1,3,5, 0-100:10 or 0-99%4")


def _too_large(part: str) -> ValueError:
    return ValueError(f"{part[:80]!r}: the largest index that Slurm can take is {MAX_INDEX}")


def count_tasks(job_id: str) -> int:
    """How many tasks an id stands for: 3 for ``12_[3-5%2]``, 1 for ``12`` and ``12_3``."""
    _, bracket, inside = job_id.partition("_[")
    return sum(map(len, _ranges(inside.rstrip("]")))) if bracket else 1


def task_ids(job_id: str) -> list[str]:
    """The plain ids in one that Slurm prints: ``12_[3-5%2]`` (tasks still pending) -> ``12_3 12_4 12_5``."""
    parent, bracket, inside = job_id.partition("_[")
    if not bracket:
        return [job_id]
    return [f"{parent}_{index}" for index in array_indices(inside.rstrip("]"))]
