"""Formats the reasons why a job waits as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcjobs.cli.placement_table import describe_start, print_placements

if TYPE_CHECKING:
    from hpcjobs.diagnosis.pending import Ahead, Pending

_SHOWN = 5
"""So many jobs ahead are listed."""


def print_pending(pending: Pending) -> None:
    """The reason, what is ahead, what would start sooner, and what to do."""
    name = f"  {pending.name}" if pending.name else ""
    print(f"job {pending.job_id}{name}: {pending.state} ({pending.reason or 'no reason yet'})")
    print(f"reason: {pending.text}")
    if pending.start_estimate is not None:
        print(f"Slurm expects it to start {describe_start(pending.start_estimate)}")
    for awaited in pending.awaited:
        print(f"waits for job {awaited.job_id} ({awaited.condition}): {awaited.state or 'no longer known to Slurm'}")
    _print_jobs("ahead in the queue", pending.waiting_before)
    _print_jobs("running there, next to end first", pending.running)
    if pending.sooner:
        print("would start sooner:")
        print_placements(pending.sooner[:_SHOWN])
    for fix in pending.fix:
        print(f"try: {fix}")


def _count(number: int | None, unit: str) -> str:
    return f"{'?' if number is None else number} {unit}{'' if number == 1 else 's'}"


def _print_jobs(title: str, jobs: tuple[Ahead, ...]) -> None:
    from hpcjobs.units import human_duration

    if not jobs:
        return
    print(f"{title}: {len(jobs)}")
    for job in jobs[:_SHOWN]:
        left = f", at most {human_duration(job.time_left_s)} left" if job.time_left_s and job.state == "RUNNING" else ""
        print(f"  {job.job_id} of {job.user}, {_count(job.nodes, 'node')}{left}")
