"""Placements of a job as a table: start and cost by site and partition."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcjobs.cli.output import print_table

if TYPE_CHECKING:
    from hpcjobs.diagnosis.placement import Cost, Placement

_AT_ONCE_S = 60.0


def print_placements(rows: Sequence[Placement]) -> None:
    """One line per partition, the best one first."""
    headers = ["SITE", "PARTITION", "VALID", "NODES", "TIME", "START", "COST AT MOST", "REMARK"]
    print_table(headers, [_cells(row) for row in rows])


def _cells(row: Placement) -> list[str]:
    return [
        row.site,
        row.partition or "-",
        "yes" if row.is_valid else "no",
        str(row.nodes) if row.nodes is not None else "-",
        row.time or "-",
        describe_start(row.start),
        _cost(row.cost),
        row.remark or "",
    ]


def describe_start(start: float | None) -> str:
    """``at once``, ``in 2h05m``; ``-`` where it is not known."""
    from hpcjobs.units import human_duration

    if start is None:
        return "-"
    seconds = start - time.time()
    return "at once" if seconds < _AT_ONCE_S else f"in {human_duration(seconds)}"


def _cost(cost: Cost | None) -> str:
    from hpcjobs.units import format_number

    if cost is None:
        return "-"
    amount = f", {format_number(cost.amount)} {cost.currency}" if cost.amount is not None else ""
    attempt = " per attempt" if cost.per_attempt else ""
    return f"{format_number(cost.node_hours)} node hours{amount}{attempt}"
