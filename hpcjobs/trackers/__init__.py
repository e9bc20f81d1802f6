"""Copies of a run's metrics for other programs' pages: TensorBoard, Weights & Biases, MLflow; a module for each.

A tracker gets points from metrics.jsonl, each with a step, a time and numbers by name. metrics.jsonl stays complete
if a tracker fails.
"""

from __future__ import annotations

import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

GROUPS = {"step": "train", "evaluation": "held_out", "checkpoint": "checkpoint"}
"""The kinds of lines that have numbers, and the group of their names."""
REACH_S = 5.0


class MetricPoint(NamedTuple):
    """Numbers of one line of metrics.jsonl, as ``train/loss``; `time_s` in seconds since 1970."""

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker copies."""

    folder: Path
    name: str
    first_step: int
    """Finished steps at this start: later ones, of an earlier start, do not count any more."""
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """One program's copy of the metrics."""

    @property
    def place(self) -> str: ...

    def write(self, points: Sequence[MetricPoint]) -> None: ...

    def close(self, *, complete: bool) -> None: ...


def read_point(line: Mapping[str, Any], *, began_at: float) -> MetricPoint | None:
    """The numbers of a line of metrics.jsonl; None for a line of another kind."""
    group = GROUPS.get(line["kind"])
    if group is None:
        return None
    numbers = {**line, **(line.get("metrics") or {})}
    values = {
        key if key == "epoch" else f"{group}/{key}": float(value)
        for key, value in numbers.items()
        if key not in ("step", "time_s") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return MetricPoint(line["step"], began_at + line["time_s"], values)


def is_reachable(url: str) -> bool:
    """Whether a server answers there, through the environment's proxies."""
    try:
        urllib.request.urlopen(url, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def read_run_id(run: TrackedRun, program: str) -> str | None:
    """The name under which an earlier start of a resumed run is known to the program."""
    place = _id_file(run, program)
    return place.read_text(encoding="utf-8").strip() if run.first_step and place.exists() else None


def write_run_id(run: TrackedRun, program: str, run_id: str) -> None:
    _id_file(run, program).write_text(f"{run_id}\n", encoding="utf-8")


def make_run_id() -> str:
    return uuid.uuid4().hex[:12]


def _id_file(run: TrackedRun, program: str) -> Path:
    return run.folder / f".{program}-run"
