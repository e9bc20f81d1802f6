"""Sums over jobs that may be too many to hold: every figure adds up, so days are summed one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import polars as pl

GROUPS: Final = ("user", "account", "partition", "qos", "state", "name", "day", "source")
_SUMS: Final = {
    "jobs": pl.col("state").is_in(["REQUEUED"]).not_().sum(),
    "failed": pl.col("state").is_in(["FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"]).sum(),
    "cpu_s": pl.col("cpu_s").sum(),
    "cpu_asked_s": (pl.col("cpus") * pl.col("elapsed_s")).filter(pl.col("cpu_s").is_not_null()).sum(),
    "cpu_alloc_s": (pl.col("cpus") * pl.col("elapsed_s")).sum(),
    "gpu_alloc_s": (pl.col("gpus") * pl.col("elapsed_s")).sum(),
    "mem_used_byte_s": (pl.col("mem_used_bytes").cast(pl.Float64) * pl.col("elapsed_s")).sum(),
    "mem_asked_byte_s": (pl.col("mem_requested_bytes").cast(pl.Float64) * pl.col("elapsed_s"))
    .filter(pl.col("mem_used_bytes").is_not_null())
    .sum(),
    "wait_s": pl.col("queue_wait_s").sum(),
    "waited": pl.col("queue_wait_s").count(),
    "lost_s": pl.col("lost_s").sum(),
    "energy_j": pl.col("energy_j").sum(),
    "cost": pl.col("cost").sum(),
}


def totals(frames: Iterable[pl.DataFrame], *, by: str | None = None) -> pl.DataFrame:
    """One row per group (or one in all): jobs, hours, efficiencies weighted by time, mean wait, energy, cost.

    Hours are CPU and GPU hours allocated; ``lost_h`` are hours of attempts that were requeued.
    """
    key = _key(by)
    parts = [frame.group_by(key.alias("group")).agg(**_SUMS) for frame in frames if len(frame)]
    if not parts:
        return pl.DataFrame()
    summed = pl.concat(parts).group_by("group").agg(pl.all().sum())
    return summed.select(
        pl.col("group").alias(by or "all"),
        "jobs",
        "failed",
        cpu_h=pl.col("cpu_alloc_s") / 3600,
        gpu_h=pl.col("gpu_alloc_s") / 3600,
        cpu_efficiency=pl.when(pl.col("cpu_asked_s") > 0).then(pl.col("cpu_s") / pl.col("cpu_asked_s")),
        mem_efficiency=pl.when(pl.col("mem_asked_byte_s") > 0).then(
            pl.col("mem_used_byte_s") / pl.col("mem_asked_byte_s")
        ),
        mean_wait_s=pl.when(pl.col("waited") > 0).then(pl.col("wait_s") / pl.col("waited")),
        lost_h=pl.col("lost_s") / 3600,
        energy_kwh=pl.col("energy_j") / 3.6e6,
        cost="cost",
    ).sort("cpu_h", descending=True)


def _key(by: str | None) -> pl.Expr:
    if by is None:
        return pl.lit("all")
    if by == "day":
        return pl.from_epoch(pl.col("ended")).dt.strftime("%Y-%m-%d").fill_null("not ended")
    return pl.col(by).fill_null("-")
