"""Merges equal lines of several ranks into one: ``0-7: epoch 1``."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpcjobs.job.array import array_text

RANK_LABEL = re.compile(r" *0*(\d+):(?!\d\d\b) ?")
"""Not the hour of a line that begins with a time of day."""
_MOST_HELD = 5_000
"""So many different lines are held back at most, to wait for equal ones of other ranks: a program that writes to a pipe
prints hundreds of lines at once."""


def merge_ranks(lines: Iterable[str]) -> Iterator[str]:
    """``lines`` with equal ones of several ranks as one; the order within each rank stays.

    A line of one rank alone stands behind what that rank printed before it, also where others are further ahead.

    Lines without a rank are printed as they are, behind all that came before them.
    """
    held = _HeldLines()
    for line in lines:
        label = RANK_LABEL.match(line)
        if label is None:
            yield from held.release(0)
            yield line
            continue
        held.add(int(label[1]), line[label.end() :])
        yield from held.release(_MOST_HELD)
    yield from held.release(0)


class _Place(NamedTuple):
    """Where a line stands among those held back; places are in the order in which the lines are given out."""

    number: int
    """Of the line of the rank that is furthest ahead."""
    behind: int
    """0: it is that line. Else it is so many lines behind it, and no other rank that is ahead has printed it."""
    rank: int


class _HeldLines:
    """Different lines, each with the ranks that have printed it."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[_Place, tuple[str, set[int]]]] = {}
        """By the number of the place."""
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)
        """By the text, which may have come several times; in their order."""
        self._newest: dict[int, _Place] = {}
        """By the rank, the place of its newest line: its next one stands behind it."""
        self._oldest_number = self._next_number = self._count = 0

    def add(self, rank: int, text: str) -> None:
        """Add the rank to the first line of this text that can be its next one, or add the line."""
        newest = self._newest.get(rank, _Place(-1, 0, rank))
        places = self._places[text]
        at = bisect_right(places, newest)
        if at < len(places):
            place = places[at]
            self._groups[place.number][place][1].add(rank)
        else:
            place = self._next_place(newest, rank)
            places.append(place)
            self._groups.setdefault(place.number, {})[place] = (text, {rank})
            self._count += 1
        self._newest[rank] = place

    def _next_place(self, newest: _Place, rank: int) -> _Place:
        if newest.number == self._next_number - 1:  # no rank is further ahead
            self._next_number += 1
            return _Place(self._next_number - 1, 0, rank)
        if newest.number < self._oldest_number:
            return _Place(self._oldest_number, 1, rank)
        return _Place(newest.number, newest.behind + 1, rank)

    def release(self, most: int) -> Iterator[str]:
        """Give out the oldest lines, until at most ``most`` are left."""
        while self._count > most:
            group = self._groups.pop(self._oldest_number, {})
            self._oldest_number += 1
            self._count -= len(group)
            for place in sorted(group):
                text, ranks = group[place]
                places = self._places[text]
                places.remove(place)  # at or near their begin
                if not places:
                    del self._places[text]
                yield f"{array_text(sorted(ranks))}: {text}"
