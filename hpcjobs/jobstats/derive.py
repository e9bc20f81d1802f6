"""Efficiencies, energy and cost of attempts, and their sum over a requeued job.

- CPU efficiency: cpu_s / (cpus x elapsed_s), as Slurm's seff has it.
- Energy, measured: ConsumedEnergyRaw counts whole nodes, so it is a job's own only when the job had all
  CPUs of its nodes. Otherwise modelled, P = cpus x watts.cpu + gpus x watts.gpu + the job's share of
  nodes x watts.node_idle, and marked as modelled. The share is the job's part of the CPUs of its nodes (1 if the site
  file has no CPU count).
- Cost: elapsed hours x (cpus x cpu_hour + gpus x gpu_hour + nodes x node_hour).
- A job that has not started has neither energy nor cost.
"""

from __future__ import annotations

import polars as pl

from hpcjobs.jobstats.columns import COLUMNS
from hpcjobs.site.models import Site

PUT_BACK = ("REQUEUED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""Ends after which Slurm itself may put a job back into the queue."""
NO_JOB = ("REQUEUED", "RESIZING", "REVOKED")
"""States of rows that are no job of their own: on its way back, continued with other resources, run by another cluster
of the federation."""
REQUEUE_S = 3600
"""A requeue is a new submission at the end of the one before, or, of a job that has ended, while slurmctld remembers it
(MinJobAge: minutes). Later the id was given out again: the counter was reset."""
JOB_KEY = ("site", "cluster", "job_id", "job_id_raw", "name", "user")
USE = "_use"
_ATTEMPT = "_attempt"
_OF_ALL = ("energy_j", "cost", "mem_per_node_bytes", "attempts", "elapsed_all_s", "lost_s")
"""Columns of a requeued job that cover every attempt, not the last one alone."""
_TYPES = {"text": pl.String, "whole": pl.Int64, "real": pl.Float64, "time": pl.Int64}
SCHEMA = {name: _TYPES[kind]() for name, (kind, _) in COLUMNS.items()}
MEASURED_J = "_counted_j"
_HAS_RUN = pl.col("started").is_not_null() | (pl.col("elapsed_s") > 0)


def derive(frame: pl.DataFrame, site: Site, *, source: str = "sacct") -> pl.DataFrame:
    """All columns of `COLUMNS`, one row per attempt; unknown values are null."""
    missing = {name: dtype for name, dtype in (SCHEMA | {MEASURED_J: pl.Int64()}).items() if name not in frame.columns}
    frame = frame.with_columns(pl.lit(None, dtype=dtype).alias(name) for name, dtype in missing.items())
    elapsed, cpus = pl.col("elapsed_s"), pl.col("cpus")
    return (
        frame.with_columns(
            cpu_efficiency=divide(pl.col("cpu_s"), cpus * elapsed),
            mem_efficiency=divide(pl.col("mem_used_bytes"), pl.col("mem_requested_bytes")),
            cost=_cost(site),
            currency=pl.lit(site.prices.currency if _has_prices(site) else None, dtype=pl.String),
            attempts=pl.lit(1, dtype=pl.Int64),
            elapsed_all_s=elapsed,
            lost_s=_lost_s(),
            site=pl.lit(site.name),
            source=pl.coalesce("source", pl.lit(source)),
            gpu_source=pl.when(pl.col("gpu_utilization").is_not_null()).then(pl.lit("sacct")),
            **_energy(site),
        )
        .with_columns(goodput=_goodput(), goodput_source=pl.lit("sacct"))
        .select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    )


def drop_revoked(frame: pl.DataFrame) -> pl.DataFrame:
    """Without the REVOKED rows of jobs of a federation that have another row: another cluster ran the job."""
    revoked = pl.col("state") == "REVOKED"
    if not (frame["state"] == "REVOKED").any():
        return frame
    key = [name for name in JOB_KEY if name != "cluster"]
    return frame.filter(~(revoked & (~revoked).any().over(key)))


def number_uses(frame: pl.DataFrame) -> pl.DataFrame:
    """Add `USE`, a number that separates jobs with the same id, oldest first.

    Ids are given out again after a reset of the counter: rows of one id with different names or users are
    different jobs, and so are rows submitted long after the end of the row before.
    """
    several = frame.select(JOB_KEY).is_duplicated()
    single = frame.filter(~several).with_columns(pl.lit(0, dtype=pl.UInt32).alias(USE))
    again = frame.filter(several).sort("submitted", "started", nulls_last=True, maintain_order=True)
    later = (pl.col("submitted") > pl.col("ended").shift() + REQUEUE_S).fill_null(False)
    return pl.concat([single, again.with_columns(later.cum_sum().over(JOB_KEY).cast(pl.UInt32).alias(USE))])


def merge_attempts(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per job of `number_uses`: the last attempt's, with energy, cost, time and peaks of all of them."""
    key = [*JOB_KEY, USE]
    frame = _join_resized(frame, key)
    several = frame.select(key).is_duplicated()
    if not several.any():
        return frame
    first = pl.col("elapsed_s").fill_null(0)
    merged = (
        frame.filter(several)
        .group_by(key, maintain_order=True)
        .agg(
            pl.all().exclude(*_OF_ALL, "energy_source").last(),
            known_sum(pl.col("energy_j")),
            joint_energy_source(),
            known_sum(pl.col("cost")),
            pl.col("mem_per_node_bytes").max(),
            attempts=pl.col("started").count().cast(pl.Int64),
            elapsed_all_s=first.sum(),
            lost_s=first.sum() - first.last() + pl.col("lost_s").last().fill_null(0),
        )
    )
    merged = merged.with_columns(goodput=_goodput()).select(frame.columns)
    return pl.concat([frame.filter(~several), merged]).sort("submitted", nulls_last=True, maintain_order=True)


def _join_resized(frame: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """One row per attempt: a resize cuts an attempt into rows that follow one another."""
    if not (frame["state"] == "RESIZING").any():
        return frame
    continues = (pl.col("state").shift().over(key) == "RESIZING").fill_null(False)
    numbered = frame.with_columns((~continues).cum_sum().over(key).alias(_ATTEMPT))
    parts = [*key, _ATTEMPT]
    is_part = numbered.select(parts).is_duplicated()
    elapsed, spent = pl.col("elapsed_s"), pl.col("cpus") * pl.col("elapsed_s")
    first = ("submitted", "eligible", "started", "queue_wait_s", "held_s")
    summed = ("elapsed_s", "elapsed_all_s", "cpu_s", "steps", "energy_j", "cost")
    most = ("tasks", "mem_requested_bytes", "mem_used_bytes", "mem_per_node_bytes", "max_rss_bytes", "gpu_mem_bytes")
    attempts = (
        numbered.filter(is_part)
        .group_by(parts, maintain_order=True)
        .agg(
            pl.all().exclude(*first, *summed, *most, "energy_source", "lost_s", "cpu_efficiency").last(),
            pl.col(first).first(),
            *(known_sum(pl.col(name)) for name in summed),
            pl.col(most).max(),
            joint_energy_source(),
            cpu_efficiency=known_sum(pl.col("cpu_s"))
            / spent.filter(pl.col("cpu_s").is_not_null() & (elapsed > 0)).sum(),
        )
    )
    mem_efficiency = divide(pl.col("mem_used_bytes"), pl.col("mem_requested_bytes"))
    attempts = attempts.with_columns(lost_s=_lost_s(), mem_efficiency=mem_efficiency).with_columns(goodput=_goodput())
    return pl.concat([numbered.filter(~is_part), attempts.select(numbered.columns)]).drop(_ATTEMPT).sort(
        "submitted", "started", nulls_last=True, maintain_order=True
    )  # fmt: skip


def divide(part: pl.Expr, total: pl.Expr) -> pl.Expr:
    """``part / total``; null where ``total`` is not above 0."""
    return pl.when(total > 0).then(part / total)


def known_sum(column: pl.Expr) -> pl.Expr:
    """The sum of the values that are known; null where none is."""
    return pl.when(column.count() > 0).then(column.sum())


def joint_energy_source() -> pl.Expr:
    """Source of a sum of ``energy_j``: the least exact source of its parts."""
    source = pl.col("energy_source").filter(pl.col("energy_j").is_not_null())
    sources = ("modelled", "nvml", "measured")
    return pl.coalesce(pl.when((source == name).any()).then(pl.lit(name)) for name in sources).alias("energy_source")


def _lost_s() -> pl.Expr:
    """Of one attempt: all of its time if Slurm may put its job back. What came before the last attempt is lost too."""
    return pl.when(pl.col("state").is_in(PUT_BACK)).then("elapsed_s").otherwise(0).cast(pl.Float64)


def _goodput() -> pl.Expr:
    return 1 - divide(pl.col("lost_s"), pl.col("elapsed_all_s"))


def _has_prices(site: Site) -> bool:
    prices = site.prices
    return any(price is not None for price in (prices.cpu_hour, prices.gpu_hour, prices.node_hour))


def _cost(site: Site) -> pl.Expr:
    if not _has_prices(site):
        return pl.lit(None, dtype=pl.Float64)
    prices = site.prices
    hourly = (
        pl.col("cpus").fill_null(0) * (prices.cpu_hour or 0.0)
        + pl.col("gpus").fill_null(0) * (prices.gpu_hour or 0.0)
        + pl.col("nodes").fill_null(0) * (prices.node_hour or 0.0)
    )
    return pl.when(_HAS_RUN).then(pl.col("elapsed_s") / 3600 * hourly)


def _energy(site: Site) -> dict[str, pl.Expr]:
    sizes = {name: {group.cpus for group in partition.groups} for name, partition in site.partitions.items()}
    cores = {name: cpus.pop() for name, cpus in sizes.items() if len(cpus) == 1}
    per_node = pl.col("partition").replace_strict(cores, default=None, return_dtype=pl.Int64)
    share = (pl.col("cpus") / (pl.col("nodes") * per_node)).clip(0, 1)
    measured = pl.when(pl.col(MEASURED_J).is_not_null() & (share >= 1)).then(pl.col(MEASURED_J).cast(pl.Float64))
    watts = site.watts
    if watts.cpu is None and watts.gpu is None and watts.node_idle is None:
        modelled = pl.lit(None, dtype=pl.Float64)
    else:
        power = (
            pl.col("cpus").fill_null(0) * (watts.cpu or 0.0)
            + pl.col("gpus").fill_null(0) * (watts.gpu or 0.0)
            + pl.col("nodes").fill_null(0) * share.fill_null(1) * (watts.node_idle or 0.0)
        )
        modelled = pl.when(_HAS_RUN).then(power * pl.col("elapsed_s"))
    which = pl.when(measured.is_not_null()).then(pl.lit("measured")).when(modelled.is_not_null())
    return {"energy_j": pl.coalesce(measured, modelled), "energy_source": which.then(pl.lit("modelled"))}
