"""Records the verdicts on nodes: one line per verdict, appended, never changed.

A bad verdict counts one and is worth half after `HALF_LIFE_S`; a good one subtracts one, never below zero; a node
that is worth `AVOIDED` or more is avoided. So one bad verdict is forgotten after a half-life, two after twice that,
and a check that finds the node well again ends it at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hpcjobs.files import AppendStore

HALF_LIFE_S = 2 * 86400.0
AVOIDED = 0.5
GOOD, BAD, CLEARED = "good", "bad", "cleared"


class NodeVerdict(NamedTuple):
    """On one node, at one time (seconds since 1970)."""

    node: str
    verdict: str
    time: float
    reason: str = ""
    job_id: str | None = None


class Standing(NamedTuple):
    """State of one node: its last verdict, its weight, and until when it is avoided (None: it is not)."""

    last: NodeVerdict
    worth: float
    avoided_until: float | None


def record_path(site: str) -> Path:
    """``$XDG_STATE_HOME/hpcjobs/nodes/SITE``, the folder of a store."""
    return AppendStore("nodes", site).folder


def append(path: Path, verdicts: Iterable[NodeVerdict]) -> None:
    """Add ``verdicts`` to the record."""
    AppendStore(str(path)).append(json.dumps(verdict._asdict()) for verdict in verdicts)


def read(path: Path) -> list[NodeVerdict]:
    """All verdicts, oldest first; empty without a readable record. A line that a full disk cut off is skipped."""
    parsed = [_parse_line(line.text) for line in AppendStore(str(path)).read(lambda error: None)]
    return sorted((verdict for verdict in parsed if verdict is not None), key=lambda verdict: verdict.time)


def _parse_line(line: bytes) -> NodeVerdict | None:
    try:
        return NodeVerdict(**json.loads(line))
    except (ValueError, TypeError):
        return None


def standings(verdicts: Iterable[NodeVerdict], now: float) -> dict[str, Standing]:
    """The standing of every node of the record at ``now``."""
    worth: dict[str, float] = {}
    last: dict[str, NodeVerdict] = {}
    for verdict in verdicts:
        before = _decay(worth[verdict.node], verdict.time - last[verdict.node].time) if verdict.node in last else 0.0
        change = {BAD: before + 1, GOOD: max(0.0, before - 1)}
        worth[verdict.node], last[verdict.node] = change.get(verdict.verdict, 0.0), verdict
    return {node: _standing(last[node], worth[node], now) for node in last}


def _decay(worth: float, seconds: float) -> float:
    return float(worth * 0.5 ** (max(0.0, seconds) / HALF_LIFE_S))


def _standing(last: NodeVerdict, worth: float, now: float) -> Standing:
    until = last.time + HALF_LIFE_S * math.log2(worth / AVOIDED) if worth > 0 else 0.0
    return Standing(last, _decay(worth, now - last.time), until if until > now else None)


def find_avoided(path: Path, now: float) -> dict[str, Standing]:
    """The nodes to leave out of a job that is submitted at ``now``."""
    current = standings(read(path), now)
    return {node: standing for node, standing in sorted(current.items()) if standing.avoided_until is not None}
