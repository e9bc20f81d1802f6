"""Equal lines of several ranks as one: ``0-7: epoch 1``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpcjobs.job.array import array_text

RANK_LABEL = re.compile(r" *0*(\d+):(?!\d\d\b) ?")
"""Not the hour of a line that begins with a time of day."""
_MOST_OPEN = 100
"""So many different lines are held back at most, to wait for equal ones of other ranks."""


def merge_ranks(lines: Iterable[str]) -> Iterator[str]:
    """``lines`` with equal ones of several ranks as one; the order within each rank stays.

    Lines without a rank are printed as they are, behind all that came before them.
    """
    held: list[tuple[str, set[int]]] = []
    for line in lines:
        label = RANK_LABEL.match(line)
        if label is None:
            yield from map(_join, held)
            held = []
            yield line
            continue
        rank, text = int(label[1]), line[label.end() :]
        newest = max((n for n, (_, ranks) in enumerate(held) if rank in ranks), default=-1)
        ranks = next((ranks for held_text, ranks in held[newest + 1 :] if held_text == text), None)
        if ranks is not None:
            ranks.add(rank)
            continue
        held.append((text, {rank}))
        if len(held) > _MOST_OPEN:
            yield _join(held.pop(0))
    yield from map(_join, held)


def _join(line: tuple[str, set[int]]) -> str:
    text, ranks = line
    return f"{array_text(sorted(ranks))}: {text}"
