"""Reads CPU time and memory of running jobs by sstat, since the accounting has those of ended steps only."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import polars as pl

from hpcjobs.errors import CommandMissingError
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.slurm.fields import read_bytes, read_clock_s, read_resource
from hpcjobs.scheduler.slurm.table import Table

_MOST_JOBS: Final = 16
"""sstat asks every node of every step: for a long list of jobs it would take long and load their nodes."""
_STEPS: Final = Table(("JobID", "MaxRSS", "TRESUsageInTot"), "|")


N = TypeVar("N", int, float)


class StepUsage(NamedTuple):
    """What the steps of a running job have used so far. None: not measured."""

    cpu_s: float | None
    mem_bytes: int | None
    """Sum of the tasks' peaks, all steps together."""
    max_rss_bytes: int | None


def add_running_usage(frame: pl.DataFrame, *, slurm_conf: str | None, runner: Runner = run) -> pl.DataFrame:
    """Running jobs with their use so far, where they are few and sstat answers; else it stays unknown."""
    running = frame.filter(pl.col("state") == "RUNNING")["job_id_raw"].to_list()
    if not 0 < len(running) <= _MOST_JOBS:
        return frame
    argv = ["sstat", "--allsteps", "--noheader", "--parsable2", "--noconvert", f"--format={','.join(_STEPS.columns)}"]
    # The exit code tells nothing: other people's jobs are refused one by one, and the rest is printed.
    try:
        answer = runner([*argv, f"--jobs={','.join(running)}"], env={"SLURM_CONF": slurm_conf} if slurm_conf else {})
    except CommandMissingError:  # some sites give their users sacct alone: the use of running jobs stays unknown
        return frame
    usage = parse_sstat(answer.out)
    if not usage:
        return frame
    schema = {"job_id_raw": pl.String, "_cpu": pl.Float64, "_mem": pl.Int64, "_rss": pl.Int64}
    seen = pl.DataFrame([(job_id, *used) for job_id, used in usage.items()], schema=schema, orient="row")
    live = pl.col("state") == "RUNNING"
    return (
        frame.join(seen, on="job_id_raw", how="left", maintain_order="left")
        .with_columns(
            cpu_s=pl.when(live & pl.col("_cpu").is_not_null())
            .then(pl.col("_cpu") + pl.col("_ended_steps_cpu_s").fill_null(0.0))
            .otherwise("cpu_s"),
            mem_used_bytes=_largest(
                live & pl.col("_mem").is_not_null(), "_mem", "_ended_steps_mem_bytes", "mem_used_bytes"
            ),
            max_rss_bytes=_largest(
                live & pl.col("_rss").is_not_null(), "_rss", "_ended_steps_rss_bytes", "max_rss_bytes"
            ),
        )
        .select(frame.columns)
    )


def _largest(known: pl.Expr, now: str, ended: str, column: str) -> pl.Expr:
    """The larger one of what runs now and of what the ended steps held; ``column`` as it is where it is not known."""
    return pl.when(known).then(pl.max_horizontal(now, ended)).otherwise(column)


def parse_sstat(out: str) -> dict[str, StepUsage]:
    """Job id -> use, from the table `_STEPS`, without Slurm's extern step."""
    used: dict[str, StepUsage] = {}
    for row in _STEPS.rows(out):
        (job_id, _, step), sampled = row.raw("JobID").partition("."), row.raw("TRESUsageInTot")
        if step == "extern":
            continue
        before = used.get(job_id, StepUsage(None, None, None))
        used[job_id] = StepUsage(
            _add(before.cpu_s, read_clock_s(read_resource(sampled, "cpu"))),
            _add(before.mem_bytes, read_bytes(read_resource(sampled, "mem"))),
            max(
                (size for size in (before.max_rss_bytes, read_bytes(row.raw("MaxRSS"))) if size is not None),
                default=None,
            ),
        )
    return used


def _add(first: N | None, second: N | None) -> N | None:
    return second if first is None else first if second is None else first + second
