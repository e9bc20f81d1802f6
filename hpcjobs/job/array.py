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
