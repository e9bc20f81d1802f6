"""Computes the goodput of requeued jobs (the time whose work was kept) from the metrics that their trainers wrote.

A resumed run cuts metrics.jsonl at the checkpoint it goes on from and opens a new part with a ``run`` line.
So every part ends where its successor began to build on it, and its last ``time_s`` is the time that lasted.
Parts are counted from the start of training, so the start-up of earlier attempts is among the lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from hpcjobs.run.folder import output_dir
from hpcjobs.runtime.summary import METRICS_FILE


def read_lasting_s(run_dir: Path) -> list[float] | None:
    """Seconds that lasted, of each part of the metrics; None where there are none."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return None
    parts: list[float] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # being written
            entry = json.loads(line)
            if entry.get("kind") == "run":
                parts.append(0.0)
            elif parts:
                parts[-1] = float(entry.get("time_s", parts[-1]))
    return parts or None


def add_goodput(frame: pl.DataFrame) -> pl.DataFrame:
    """Lost seconds of requeued jobs by their metrics, where a run folder has some."""
    requeued = frame.filter((pl.col("attempts") > 1) & pl.col("run_dir").is_not_null())
    lost_s_of = {}
    for job_id, run_dir, lost in requeued.select("job_id", "run_dir", "lost_s").rows():
        parts = read_lasting_s(output_dir(Path(run_dir), job_id))
        if parts is not None:
            lost_s_of[job_id] = max(0.0, lost - sum(parts[:-1]))
    if not lost_s_of:
        return frame
    known = pl.col("job_id").is_in(list(lost_s_of))
    lost = pl.col("job_id").replace_strict(lost_s_of, default=None, return_dtype=pl.Float64)
    return frame.with_columns(
        lost_s=pl.when(known).then(lost).otherwise("lost_s"),
        goodput=pl.when(known).then(1 - lost / pl.col("elapsed_all_s")).otherwise("goodput"),
        goodput_source=pl.when(known).then(pl.lit("checkpoints")).otherwise("goodput_source"),
    )
