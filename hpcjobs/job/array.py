"""Job arrays in Slurm's spelling: ``0-9``, ``1,3,5-7``, ``0-100:10``, ``0-99%4``."""

from __future__ import annotations


def array_indices(spec: str) -> list[int]:
    """The task indices of ``spec``, ascending; the throttle after ``%`` does not matter here.

    Raises:
        ValueError: not an array specification.
    """
    found: set[int] = set()
    for part in spec.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        try:
            indices = range(int(first), int(last or first) + 1, int(step or 1))
        except ValueError as error:
            raise ValueError(f"array {spec!r} is not understood; say 0-9, 1,3,5, 0-100:10 or 0-99%4") from error
        found.update(indices)
    return sorted(found)


def task_ids(job_id: str) -> list[str]:
    """The plain ids in one that Slurm prints: ``12_[3-5%2]`` (tasks still pending) -> ``12_3 12_4 12_5``."""
    parent, bracket, inside = job_id.partition("_[")
    if not bracket:
        return [job_id]
    return [f"{parent}_{index}" for index in array_indices(inside.rstrip("]"))]
