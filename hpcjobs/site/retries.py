"""How often a job may be restarted, by what ended it: ``timeout=∞,preempt=∞,node=3,error=0``."""

from __future__ import annotations

from hpcjobs.errors import nearest
from hpcjobs.site.frozen import Frozen

UNLIMITED = 10**9
WARNING_S = 300
"""Ahead of the time limit, as long as the program has measured nothing better (a quarter of a shorter limit)."""
_UNLIMITED_NAMES = ("∞", "inf", "unlimited")


class Retries(Frozen, frozen=True):
    """Budgets, counted over all attempts of a job."""

    timeout: int = UNLIMITED
    """It was saved ahead of its time limit."""
    preempt: int = UNLIMITED
    """It had to make room, or somebody signalled it."""
    node: int = 3
    """A node failed, a rank was killed or lost, or all ranks stood still."""
    error: int = 0
    """The program failed."""

    def __str__(self) -> str:
        counts = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ",".join(f"{name}={'∞' if count == UNLIMITED else count}" for name, count in counts)


def parse_retries(text: str) -> Retries | None:
    """``off``: none; ``on``: the defaults; ``node=5,error=1``: the defaults but for these.

    Raises:
        ValueError: neither of these.
    """
    if text in ("on", "off"):
        return Retries() if text == "on" else None
    counts = {}
    for pair in text.split(","):
        name, _, count = (part.strip() for part in pair.partition("="))
        if name not in Retries.__struct_fields__:
            raise ValueError(
                f"retries {text!r}: {name!r} is neither on, off nor a cause;"
                f" {nearest(name, Retries.__struct_fields__)}; use on, off, or counts such as timeout=∞,node=3"
            )
        if count not in _UNLIMITED_NAMES and not (count.isascii() and count.isdigit() and int(count) < UNLIMITED):
            raise ValueError(f"retries {text!r}: {name}={count!r} is neither a number nor ∞ (inf)")
        counts[name] = UNLIMITED if count in _UNLIMITED_NAMES else int(count)
    return Retries(**counts)
