"""Tables of ``hpcjobs report jobs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcjobs.cli.output import print_table

if TYPE_CHECKING:
    import polars as pl

_HEADERS = ["JOB", "NAME", "USER", "STATE", "NODES", "CPUS", "GPUS", "WAIT", "ELAPSED", "CPU", "MEM", "GOODPUT",
            "ENERGY", "COST", "ADVICE"]  # fmt: skip


def print_jobs(frame: pl.DataFrame, attempts: pl.DataFrame) -> None:
    """One row per job with its advice, and the sums over all their attempts."""
    import polars as pl

    from hpcjobs.accounting.advice import JobUsage, advise
    from hpcjobs.accounting.derive import joint_energy_source, known_sum
    from hpcjobs.accounting.totals import totals

    if frame.is_empty():
        print("no jobs")
        return
    rows = frame.to_dicts()
    print_table(_HEADERS, ([*_cells(row), "; ".join(map(str, advise(JobUsage.from_row(row))))] for row in rows))
    print()
    # Of the jobs: their rows know what checkpoints kept, and the energy that a monitor measured.
    of_jobs = frame.select(
        joint_energy_source(),
        lost_h=known_sum(pl.col("lost_s")) / 3600,
        energy_kwh=known_sum(pl.col("energy_j")) / 3.6e6,
    )
    print_totals(totals([attempts]).with_columns(of_jobs), "all")


def _cells(job: dict[str, Any]) -> list[str]:
    from hpcjobs.accounting.columns import format_energy
    from hpcjobs.units import human_duration

    def span(value: float | None) -> str:
        return "-" if value is None else human_duration(value)

    return [
        job["job_id"],
        job["name"] or "-",
        job["user"] or "-",
        job["state"],
        *(str(job[key] if job[key] is not None else "-") for key in ("nodes", "cpus", "gpus")),
        span(job["queue_wait_s"]),
        span(job["elapsed_s"]),
        percent(job["cpu_efficiency"]),
        percent(job["mem_efficiency"]),
        percent(job["goodput"]) if job["attempts"] and job["attempts"] > 1 else "",
        format_energy(job["energy_j"], job["energy_source"]),
        "-" if job["cost"] is None else f"{format_cost(job['cost'])} {job['currency']}",
    ]


def percent(share: float | None) -> str:
    """``0.934`` -> ``93%``."""
    return "-" if share is None else f"{share:.0%}"


def number(value: float | None, style: str) -> str:
    """The value; ``-`` where it is not known."""
    return "-" if value is None else f"{value:{style}}"


def format_cost(amount: float) -> str:
    """Two decimals; ``< 0.01`` for what they would call nothing."""
    return "< 0.01" if 0 < amount < 0.005 else f"{amount:.2f}"


def print_totals(frame: pl.DataFrame, by: str) -> None:
    """One row per group of ``by``."""
    headers = [by.upper(), "JOBS", "FAILED", "CPU H", "GPU H", "CPU", "MEM", "MEAN WAIT", "LOST H", "ENERGY", "COST"]
    from hpcjobs.accounting.columns import format_energy
    from hpcjobs.units import human_duration

    def cells(row: dict[str, Any]) -> list[str]:
        joules = None if row["energy_kwh"] is None else row["energy_kwh"] * 3.6e6
        return [
            str(row[by]), str(row["jobs"]), str(row["failed"]),
            number(row["cpu_h"], ".2f"), number(row["gpu_h"], ".2f"),
            percent(row["cpu_efficiency"]), percent(row["mem_efficiency"]),
            "-" if row["mean_wait_s"] is None else human_duration(row["mean_wait_s"]),
            number(row["lost_h"], ".2f"), format_energy(joules, row["energy_source"]),
            "-" if row["cost"] is None else format_cost(row["cost"]),
        ]  # fmt: skip

    if frame.is_empty():
        print("no jobs")
        return
    print_table(headers, map(cells, frame.to_dicts()))
