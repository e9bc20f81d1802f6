"""Counts doubtful rows of the accounting by kind and keeps examples of each; no value is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

_MOST_EXAMPLES = 20


class Doubt(NamedTuple):
    """A kind of doubtful row: how many, and which (the first twenty)."""

    kind: str
    rows: int
    examples: tuple[str, ...]


class Doubts:
    """Collects rows that were left out or only partly used."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, kind: str, rows: Iterable[str]) -> None:
        """Count ``rows`` under ``kind``."""
        for row in rows:
            self._counts[kind] += 1
            examples = self._examples.setdefault(kind, [])
            if len(examples) < _MOST_EXAMPLES and row not in examples:
                examples.append(row)

    def by_frequency(self) -> list[Doubt]:
        """Every kind there is, the most frequent first."""
        return [Doubt(kind, count, tuple(self._examples[kind])) for kind, count in self._counts.most_common()]
